// NCCL without GPUs, under its own symbols: for the driver of tests/fakes/cuda, whose addresses are of the host too.
// README.md says what it does and refuses.

#include "tests/fakes/nccl/nccl.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda/driver_api.h"
#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/clique.h"
#include "tests/fakes/nccl/shared_clique.h"

// Of the fake driver: this process' or the library's. (NCCL finds the driver at run time; so much alike it need not
// be.)
extern "C" shardd::cu::Result cuLaunchHostFunc(shardd::cu::Stream stream, shardd::cu::HostFunction function,
                                               void* data);
extern "C" shardd::cu::Result cuCtxPopCurrent(shardd::cu::Context* context);
extern "C" shardd::cu::Result cuCtxPushCurrent(shardd::cu::Context context);

namespace shardd::nccl {
namespace {

struct Communicator {
  std::shared_ptr<Clique> clique;
  std::shared_ptr<SharedMember> shared;  // others of the clique are of other processes; what `clique` has is not used
  int rank = 0;
  uint64_t gpu = 0;  // the fake driver's context: the same in every process
  uint64_t launches = 0;
  std::atomic<int> asks = 0;  // the first question after a call is answered with kInProgress
};

std::mutex g_mutex;
std::map<std::string, std::weak_ptr<Clique>> g_cliques;  // by id
uint64_t g_next_id = 1;
std::set<Comm> g_comms;  // neither destroyed nor aborted
bool IsThere(Comm comm) {
  const std::lock_guard lock(g_mutex);
  return g_comms.count(comm) > 0;
}
void IsGone(Comm comm) {
  const std::lock_guard lock(g_mutex);
  g_comms.erase(comm);
}

// Of this thread, until it has others.
std::string& LastError() {
  thread_local std::string words = "no last words";
  return words;
}

struct Group {
  int depth = 0;
  std::map<Communicator*, std::pair<Stream, std::vector<Call>>> calls;
  bool makes = false;                                      // communicators, or windows
  std::map<std::string, std::vector<Communicator*>> made;  // by id
};
Group& ThisGroup() {
  thread_local Group group;
  return group;
}

// FAKE_NCCL_FAIL=FUNCTION:NTH: the nth call of it gives kInternalError.
bool Fails(const char* function) {
  static std::mutex mutex;
  static std::map<std::string, int> counts;
  const char* const want = std::getenv("FAKE_NCCL_FAIL");
  if (want == nullptr) return false;
  const std::lock_guard lock(mutex);
  return std::string(want) == std::string(function) + ":" + std::to_string(++counts[function]);
}

int Version() {
  const char* const told = std::getenv("FAKE_NCCL_VERSION");
  return told == nullptr ? 22809 : std::atoi(told);
}

// In the first sum, or with the communicator.
bool SumsConnect() {
  const char* const told = std::getenv("NCCL_RUNTIME_CONNECT");
  return told == nullptr || std::string(told) != "0";
}

// As the library reads what it is given: the front part that the caller's `size` and `version` say.
Result CheckConfig(const Config& config) {
  if (config.magic != Config().magic || config.size < sizeof(Config) || config.version < 22700) return kInvalidArgument;
  if (config.max_ctas != kUndefined && (config.max_ctas < 1 || config.max_ctas > 64)) return kInvalidArgument;
  const int policies = kCtaPolicyEfficiency | kCtaPolicyZero;
  if (config.cta_policy == kUndefined) return kSuccess;
  if (config.cta_policy < 0 || config.cta_policy > policies) return kInvalidArgument;
  return config.cta_policy == policies && Version() < kPoliciesTogetherVersion ? kInvalidArgument : kSuccess;
}

struct Item {
  std::shared_ptr<Clique> clique;
  std::shared_ptr<SharedMember> shared;
  uint64_t number;
  int rank;
  std::vector<Call> calls;
};
void RunItem(void* data) {
  const std::unique_ptr<Item> item(static_cast<Item*>(data));
  if (item->shared != nullptr) return item->shared->Run(item->calls);
  item->clique->Run(item->number, item->rank, std::move(item->calls));
}

Result Put(Communicator* comm, Stream stream, std::vector<Call> calls) {
  for (const Call& call : calls) {
    if (call.moves != calls[0].moves || (call.moves && comm->shared == nullptr)) return kInvalidUsage;
  }
  {
    const std::lock_guard lock(comm->clique->mutex);
    for (const Call& call : calls) comm->clique->windows.Use(comm->rank, call.send, 1);
  }
  if (comm->shared != nullptr) comm->shared->Connect(calls, SumsConnect());
  auto item = std::make_unique<Item>(Item{comm->clique, comm->shared, comm->launches, comm->rank, std::move(calls)});
  const cu::Result result = cuLaunchHostFunc(static_cast<cu::Stream>(stream), RunItem, item.get());
  if (result != cu::kSuccess) return kUnhandledCudaError;
  (void)item.release();
  ++comm->launches;
  comm->asks = 1;
  return kInProgress;
}

Result Add(Communicator* comm, Stream stream, const std::vector<Call>& calls) {
  if (comm == nullptr || stream == nullptr || !IsThere(reinterpret_cast<Comm>(comm))) return kInvalidArgument;
  for (const Call& call : calls) {
    if (call.moves) {
      const bool is_pair = call.root >= 0 && call.root < comm->clique->ranks && call.root != comm->rank;
      if (!is_pair || (call.send == nullptr && call.receive == nullptr)) return kInvalidArgument;
      continue;
    }
    const bool writes = call.all || call.root == comm->rank;
    if (call.send == nullptr || (writes && call.receive == nullptr) || call.root < 0 ||
        call.root >= comm->clique->ranks) {
      return kInvalidArgument;
    }
  }
  Group& group = ThisGroup();
  if (group.depth == 0) return Put(comm, stream, calls);
  auto& [on, held] = group.calls[comm];
  if (!held.empty() && on != stream) return kInvalidUsage;
  on = stream;
  held.insert(held.end(), calls.begin(), calls.end());
  return kSuccess;
}

Communicator* Of(Comm comm) { return reinterpret_cast<Communicator*>(comm); }

// What the group has made. Where one group has all members, they are of this process; else they meet in shared memory,
// also those of other threads here.
Result JoinOthers(const std::string& id, const std::vector<Communicator*>& made) {
  if (made.size() == static_cast<size_t>(made[0]->clique->ranks)) return kSuccess;
  for (Communicator* const comm : made) {
    comm->shared = SharedMember::Join(id, comm->clique->ranks, comm->rank, comm->gpu);
    if (comm->shared == nullptr) return kInvalidUsage;
  }
  return kSuccess;
}

}  // namespace

extern "C" {

#define FAKE_NCCL __attribute__((visibility("default")))

FAKE_NCCL Result ncclGetVersion(int* version) {
  *version = Version();
  return kSuccess;
}
FAKE_NCCL const char* ncclGetErrorString(Result result) {
  return result == kUnhandledCudaError ? "unhandled cuda error" : "an error of the fake";
}
FAKE_NCCL const char* ncclGetLastError(Comm) { return LastError().c_str(); }
FAKE_NCCL Result ncclGetUniqueId(UniqueId* id) {
  if (Fails("GetUniqueId")) return kInternalError;
  const std::lock_guard lock(g_mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();  // processes' numbers come again
  std::snprintf(id->internal, sizeof(id->internal), "fake-nccl-%d-%lld-%llu", static_cast<int>(getpid()),
                static_cast<long long>(now), static_cast<unsigned long long>(g_next_id++));
  return kSuccess;
}
FAKE_NCCL Result ncclCommInitRankConfig(Comm* comm, int ranks, UniqueId id, int rank, Config* config) {
  if (Fails("CommInitRankConfig")) return kInternalError;
  if (CheckConfig(*config) != kSuccess || rank < 0 || rank >= ranks) return kInvalidArgument;
  // From one thread for all members, one after the other: outside of a group the first would wait for the second.
  if (ThisGroup().depth == 0 || config->blocking != 0) return kInvalidUsage;
  ThisGroup().makes = true;
  const std::lock_guard lock(g_mutex);
  std::shared_ptr<Clique> clique = g_cliques[id.internal].lock();
  if (clique == nullptr) g_cliques[id.internal] = clique = std::make_shared<Clique>(ranks);
  if (clique->ranks != ranks) return kInvalidArgument;
  auto* const made = new Communicator();
  made->clique = clique;
  made->rank = rank;
  made->asks = 1;
  cu::Context context = nullptr;
  const bool has_context = cuCtxPopCurrent(&context) == cu::kSuccess && cuCtxPushCurrent(context) == cu::kSuccess;
  made->gpu = reinterpret_cast<uintptr_t>(context);
  ThisGroup().made[id.internal].push_back(made);
  {
    const std::lock_guard joining(clique->mutex);
    ++clique->joined;
    // Found when the members have told each other of their GPUs: by the questions afterwards.
    if (has_context && !clique->members.emplace(context, rank).second) {
      clique->mismatched = true;
      LastError() = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                    std::to_string(clique->members[context]) + " both on one CUDA device";
    }
  }
  *comm = reinterpret_cast<Comm>(made);
  g_comms.insert(*comm);
  return kInProgress;
}
FAKE_NCCL Result ncclCommGetAsyncError(Comm comm, Result* result) {
  if (!IsThere(comm)) return kInvalidArgument;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  const bool asked = Of(comm)->asks.exchange(0) == 0;
  if (const auto& shared = Of(comm)->shared; shared != nullptr) {
    *result = asked ? shared->State(&LastError()) : kInProgress;
    return kSuccess;
  }
  const Result windows = clique.windows.State(Of(comm)->rank);
  if (windows == kInvalidArgument) LastError() = clique.windows.why();
  *result = clique.mismatched ? kInvalidUsage : !asked || clique.joined < clique.ranks ? kInProgress : windows;
  return kSuccess;
}
FAKE_NCCL Result ncclCommDestroy(Comm comm) {
  IsGone(comm);
  delete Of(comm);
  return kSuccess;
}
FAKE_NCCL Result ncclCommAbort(Comm comm) {
  IsGone(comm);
  {
    Clique& clique = *Of(comm)->clique;
    const std::lock_guard lock(clique.mutex);
    clique.aborted = Of(comm)->shared == nullptr;
    clique.changed.notify_all();
  }
  if (Of(comm)->shared != nullptr) Of(comm)->shared->Leave();
  delete Of(comm);
  return kSuccess;
}
FAKE_NCCL Result ncclReduce(const void* send, void* receive, size_t count, DataType dtype, RedOp op, int root,
                            Comm comm, Stream stream) {
  if (Fails("Reduce")) return kInternalError;
  if (dtype != kFloat32 || op != kSum) return kInvalidArgument;
  return Add(Of(comm), stream,
             {{false, false, static_cast<const float*>(send), static_cast<float*>(receive), count, root}});
}
FAKE_NCCL Result ncclAllReduce(const void* send, void* receive, size_t count, DataType dtype, RedOp op, Comm comm,
                               Stream stream) {
  if (Fails("AllReduce")) return kInternalError;
  if (dtype != kFloat32 || op != kSum) return kInvalidArgument;
  return Add(Of(comm), stream,
             {{false, true, static_cast<const float*>(send), static_cast<float*>(receive), count, 0}});
}
FAKE_NCCL Result ncclSend(const void* send, size_t count, DataType dtype, int peer, Comm comm, Stream stream) {
  if (Fails("Send")) return kInternalError;
  if (dtype != kInt8) return kInvalidArgument;
  return Add(Of(comm), stream, {{false, false, static_cast<const float*>(send), nullptr, count, peer, true}});
}
FAKE_NCCL Result ncclRecv(void* receive, size_t count, DataType dtype, int peer, Comm comm, Stream stream) {
  if (Fails("Recv")) return kInternalError;
  if (dtype != kInt8) return kInvalidArgument;
  return Add(Of(comm), stream, {{false, false, nullptr, static_cast<float*>(receive), count, peer, true}});
}
FAKE_NCCL Result ncclReduceScatter(const void* send, void* receive, size_t count, DataType dtype, RedOp op, Comm comm,
                                   Stream stream) {
  if (Fails("ReduceScatter")) return kInternalError;
  if (dtype != kFloat32 || op != kSum || !IsThere(comm)) return kInvalidArgument;
  std::vector<Call> calls;
  for (int root = 0; root < Of(comm)->clique->ranks; ++root) {
    calls.push_back({true, false, static_cast<const float*>(send) + static_cast<size_t>(root) * count,
                     static_cast<float*>(receive), count, root});
  }
  return Add(Of(comm), stream, calls);
}
FAKE_NCCL Result ncclCommWindowRegister(Comm comm, void* buffer, size_t size_bytes, Window* window, int flags) {
  if (!IsThere(comm) || window == nullptr) return kInvalidArgument;
  *window = nullptr;
  if (buffer == nullptr || size_bytes == 0) return kInvalidArgument;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  if (Fails("CommWindowRegister")) {
    clique.mismatched = true;  // as after any error of a group
    return kInternalError;
  }
  const char* const symmetric = std::getenv("FAKE_NCCL_SYMMETRIC");
  if (Of(comm)->shared != nullptr || (symmetric != nullptr && std::string(symmetric) == "0")) return kSuccess;
  // The members' registrations wait for each other: from one thread only in a group.
  if (ThisGroup().depth == 0 && clique.ranks > 1) return kInvalidUsage;
  ThisGroup().makes = ThisGroup().depth > 0;
  clique.windows.Register(Of(comm)->rank, buffer, size_bytes, flags, window);
  Of(comm)->asks = 1;
  return ThisGroup().depth > 0 ? kSuccess : kInProgress;
}
FAKE_NCCL Result ncclCommWindowDeregister(Comm comm, Window window) {
  if (!IsThere(comm)) return kInvalidArgument;
  if (Fails("CommWindowDeregister")) return kInternalError;
  if (window == nullptr) return kSuccess;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  return clique.windows.Deregister(Of(comm)->rank, window);
}
FAKE_NCCL Result ncclGroupStart() {
  ++ThisGroup().depth;
  return kSuccess;
}
FAKE_NCCL Result ncclGroupEnd() {
  Group& group = ThisGroup();
  if (group.depth == 0) return kInvalidUsage;
  if (--group.depth > 0) return kSuccess;
  auto calls = std::exchange(group.calls, {});
  Result result = std::exchange(group.makes, false) ? kInProgress : kSuccess;
  for (const auto& [id, made] : std::exchange(group.made, {})) {
    const std::lock_guard lock(g_mutex);
    if (const Result joined = JoinOthers(id, made); joined != kSuccess) return joined;
  }
  for (auto& [comm, put] : calls) {
    result = Put(comm, put.first, std::move(put.second));
    if (result != kInProgress) return result;
  }
  return result;
}

}  // extern "C"

}  // namespace shardd::nccl

namespace shardd::fake_nccl {

nccl::Table Table() {
  nccl::Table table;
#define SHARDD_FAKE_NCCL_SET(name, parameters) table.name = &nccl::nccl##name;
  SHARDD_NCCL_FUNCTIONS(SHARDD_FAKE_NCCL_SET)
  SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_FAKE_NCCL_SET)
#undef SHARDD_FAKE_NCCL_SET
  table.GetErrorString = &nccl::ncclGetErrorString;
  table.GetLastError = &nccl::ncclGetLastError;
  return table;
}

}  // namespace shardd::fake_nccl
