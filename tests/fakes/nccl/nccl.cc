// NCCL without GPUs, under its own symbols: for the driver of tests/fakes/cuda, whose addresses are of the host too.
// README.md says what it does and refuses.

#include "tests/fakes/nccl/nccl.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
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
#include "tests/fakes/nccl/room.h"
#include "tests/fakes/nccl/shared_clique.h"

namespace shardd::nccl {
namespace {

struct Communicator {
  std::shared_ptr<Clique> clique;
  std::shared_ptr<SharedMember> shared;  // others of the clique are of other processes; what `clique` has is not used
  int rank = 0;
  uint64_t gpu = 0;  // the fake driver's context: the same in every process
  uint64_t launches = 0;
  std::atomic<int> asks = 0;  // the first question after a call is answered with ncclInProgress
};

std::mutex g_mutex;
std::map<std::string, std::weak_ptr<Clique>> g_cliques;  // by id
uint64_t g_next_id = 1;
std::set<ncclComm_t> g_comms;  // neither destroyed nor aborted
bool IsThere(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  return g_comms.count(comm) > 0;
}
void IsGone(ncclComm_t comm) {
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
  std::map<Communicator*, std::pair<cudaStream_t, std::vector<Call>>> calls;
  bool makes = false;                                      // communicators, or windows
  std::map<std::string, std::vector<Communicator*>> made;  // by id
};
Group& ThisGroup() {
  thread_local Group group;
  return group;
}

// FAKE_NCCL_FAIL=FUNCTION:NTH: the nth call of it gives ncclInternalError. FAKE_NCCL_DIE: it kills the process.
bool Fails(const char* function) {
  static std::mutex mutex;
  static std::map<std::string, int> counts;
  const char* const want = std::getenv("FAKE_NCCL_FAIL");
  const char* const dies = std::getenv("FAKE_NCCL_DIE");
  if (want == nullptr && dies == nullptr) return false;
  const std::lock_guard lock(mutex);
  const std::string call = std::string(function) + ":" + std::to_string(++counts[function]);
  if (dies != nullptr && dies == call) (void)std::raise(SIGKILL);
  return want != nullptr && want == call;
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
constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
ncclResult_t CheckConfig(const ncclConfig_t& config) {
  if (config.magic != kInitial.magic || config.size < sizeof(ncclConfig_t) || config.version < 22700)
    return ncclInvalidArgument;
  if (config.maxCTAs != NCCL_CONFIG_UNDEF_INT && (config.maxCTAs < 1 || config.maxCTAs > 64))
    return ncclInvalidArgument;
  const int policies = NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO;
  if (config.CTAPolicy == NCCL_CONFIG_UNDEF_INT) return ncclSuccess;
  if (config.CTAPolicy < 0 || config.CTAPolicy > policies) return ncclInvalidArgument;
  return config.CTAPolicy == policies && Version() < kPoliciesTogetherVersion ? ncclInvalidArgument : ncclSuccess;
}

struct Item {
  std::shared_ptr<Clique> clique;
  std::shared_ptr<SharedMember> shared;
  uint64_t number;
  int rank;
  uint64_t gpu;
  std::vector<Call> calls;
};
// FAKE_NCCL_SUM_US: how long the sums of one group take besides.
std::chrono::microseconds SumTime() {
  static const char* const told = std::getenv("FAKE_NCCL_SUM_US");
  return std::chrono::microseconds(told == nullptr ? 0 : std::atoi(told));
}
void RunItem(void* data) {
  const std::unique_ptr<Item> item(static_cast<Item*>(data));
  if (!item->calls.empty() && !item->calls[0].moves) std::this_thread::sleep_for(SumTime());
  if (item->shared != nullptr) {
    const Room room(item->gpu, *item->shared);
    return item->shared->Run(item->calls);
  }
  item->clique->Run(item->number, item->rank, std::move(item->calls));
}

ncclResult_t Put(Communicator* comm, cudaStream_t stream, std::vector<Call> calls) {
  for (const Call& call : calls) {
    if (call.moves != calls[0].moves || (call.moves && comm->shared == nullptr)) return ncclInvalidUsage;
  }
  {
    const std::lock_guard lock(comm->clique->mutex);
    for (const Call& call : calls) comm->clique->windows.Use(comm->rank, call.send, 1);
  }
  if (comm->shared != nullptr) comm->shared->Connect(calls, SumsConnect());
  auto item =
      std::make_unique<Item>(Item{comm->clique, comm->shared, comm->launches, comm->rank, comm->gpu, std::move(calls)});
  const CUresult result = cuLaunchHostFunc(static_cast<CUstream>(stream), RunItem, item.get());
  if (result != CUDA_SUCCESS) return ncclUnhandledCudaError;
  (void)item.release();
  ++comm->launches;
  comm->asks = 1;
  return ncclInProgress;
}

ncclResult_t Add(Communicator* comm, cudaStream_t stream, const std::vector<Call>& calls) {
  if (comm == nullptr || stream == nullptr || !IsThere(reinterpret_cast<ncclComm_t>(comm))) return ncclInvalidArgument;
  for (const Call& call : calls) {
    if (call.moves) {
      const bool is_pair = call.root >= 0 && call.root < comm->clique->ranks && call.root != comm->rank;
      if (!is_pair || (call.send == nullptr && call.receive == nullptr)) return ncclInvalidArgument;
      continue;
    }
    const bool writes = call.all || call.root == comm->rank;
    if (call.send == nullptr || (writes && call.receive == nullptr) || call.root < 0 ||
        call.root >= comm->clique->ranks) {
      return ncclInvalidArgument;
    }
  }
  Group& group = ThisGroup();
  if (group.depth == 0) return Put(comm, stream, calls);
  auto& [on, held] = group.calls[comm];
  if (!held.empty() && on != stream) return ncclInvalidUsage;
  on = stream;
  held.insert(held.end(), calls.begin(), calls.end());
  return ncclSuccess;
}

Communicator* Of(ncclComm_t comm) { return reinterpret_cast<Communicator*>(comm); }

// What the group has made. Where one group has all members, they are of this process; else they meet in shared memory,
// also those of other threads here.
ncclResult_t JoinOthers(const std::string& id, const std::vector<Communicator*>& made) {
  if (made.size() == static_cast<size_t>(made[0]->clique->ranks)) return ncclSuccess;
  for (Communicator* const comm : made) {
    comm->shared = SharedMember::Join(id, comm->clique->ranks, comm->rank, comm->gpu);
    if (comm->shared == nullptr) return ncclInvalidUsage;
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {

#define FAKE_NCCL __attribute__((visibility("default")))

FAKE_NCCL ncclResult_t ncclGetVersion(int* version) {
  *version = Version();
  return ncclSuccess;
}
FAKE_NCCL const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclUnhandledCudaError ? "unhandled cuda error" : "an error of the fake";
}
FAKE_NCCL const char* ncclGetLastError(ncclComm_t) { return LastError().c_str(); }
FAKE_NCCL ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (Fails("GetUniqueId")) return ncclInternalError;
  const std::lock_guard lock(g_mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();  // processes' numbers come again
  std::snprintf(id->internal, sizeof(id->internal), "fake-nccl-%d-%lld-%llu", static_cast<int>(getpid()),
                static_cast<long long>(now), static_cast<unsigned long long>(g_next_id++));
  return ncclSuccess;
}
FAKE_NCCL ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                              ncclConfig_t* config) {
  if (Fails("CommInitRankConfig")) return ncclInternalError;
  if (CheckConfig(*config) != ncclSuccess || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  // From one thread for all members, one after the other: outside of a group the first would wait for the second.
  if (ThisGroup().depth == 0 || config->blocking != 0) return ncclInvalidUsage;
  ThisGroup().makes = true;
  const std::lock_guard lock(g_mutex);
  std::shared_ptr<Clique> clique = g_cliques[id.internal].lock();
  if (clique == nullptr) g_cliques[id.internal] = clique = std::make_shared<Clique>(ranks);
  if (clique->ranks != ranks) return ncclInvalidArgument;
  auto* const made = new Communicator();
  made->clique = clique;
  made->rank = rank;
  made->asks = 1;
  CUcontext context = nullptr;
  const bool has_context = cuCtxPopCurrent(&context) == CUDA_SUCCESS && cuCtxPushCurrent(context) == CUDA_SUCCESS;
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
  *comm = reinterpret_cast<ncclComm_t>(made);
  g_comms.insert(*comm);
  return ncclInProgress;
}
FAKE_NCCL ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  if (!IsThere(comm)) return ncclInvalidArgument;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  const bool asked = Of(comm)->asks.exchange(0) == 0;
  if (const auto& shared = Of(comm)->shared; shared != nullptr) {
    *result = asked ? shared->State(&LastError()) : ncclInProgress;
    return ncclSuccess;
  }
  const ncclResult_t windows = clique.windows.State(Of(comm)->rank);
  if (windows == ncclInvalidArgument) LastError() = clique.windows.why();
  *result = clique.mismatched ? ncclInvalidUsage : !asked || clique.joined < clique.ranks ? ncclInProgress : windows;
  return ncclSuccess;
}
FAKE_NCCL ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  IsGone(comm);
  delete Of(comm);
  return ncclSuccess;
}
FAKE_NCCL ncclResult_t ncclCommAbort(ncclComm_t comm) {
  IsGone(comm);
  {
    Clique& clique = *Of(comm)->clique;
    const std::lock_guard lock(clique.mutex);
    clique.aborted = Of(comm)->shared == nullptr;
    clique.changed.notify_all();
  }
  if (Of(comm)->shared != nullptr) Of(comm)->shared->Leave();
  delete Of(comm);
  return ncclSuccess;
}
FAKE_NCCL ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                  int root, ncclComm_t comm, cudaStream_t stream) {
  if (Fails("Reduce")) return ncclInternalError;
  if (dtype != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  return Add(Of(comm), stream,
             {{false, false, static_cast<const float*>(send), static_cast<float*>(receive), count, root}});
}
FAKE_NCCL ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                                     ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  if (Fails("AllReduce")) return ncclInternalError;
  if (dtype != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  return Add(Of(comm), stream,
             {{false, true, static_cast<const float*>(send), static_cast<float*>(receive), count, 0}});
}
FAKE_NCCL ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                                cudaStream_t stream) {
  if (Fails("Send")) return ncclInternalError;
  if (dtype != ncclInt8) return ncclInvalidArgument;
  return Add(Of(comm), stream, {{false, false, static_cast<const float*>(send), nullptr, count, peer, true}});
}
FAKE_NCCL ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                                cudaStream_t stream) {
  if (Fails("Recv")) return ncclInternalError;
  if (dtype != ncclInt8) return ncclInvalidArgument;
  return Add(Of(comm), stream, {{false, false, nullptr, static_cast<float*>(receive), count, peer, true}});
}
FAKE_NCCL ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  if (Fails("ReduceScatter")) return ncclInternalError;
  if (dtype != ncclFloat32 || op != ncclSum || !IsThere(comm)) return ncclInvalidArgument;
  std::vector<Call> calls;
  for (int root = 0; root < Of(comm)->clique->ranks; ++root) {
    calls.push_back({true, false, static_cast<const float*>(send) + static_cast<size_t>(root) * count,
                     static_cast<float*>(receive), count, root});
  }
  return Add(Of(comm), stream, calls);
}
FAKE_NCCL ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t size_bytes, ncclWindow_t* window,
                                              int flags) {
  if (!IsThere(comm) || window == nullptr) return ncclInvalidArgument;
  *window = nullptr;
  if (buffer == nullptr || size_bytes == 0) return ncclInvalidArgument;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  if (Fails("CommWindowRegister")) {
    clique.mismatched = true;  // as after any error of a group
    return ncclInternalError;
  }
  const char* const symmetric = std::getenv("FAKE_NCCL_SYMMETRIC");
  if (Of(comm)->shared != nullptr || (symmetric != nullptr && std::string(symmetric) == "0")) return ncclSuccess;
  // The members' registrations wait for each other: from one thread only in a group.
  if (ThisGroup().depth == 0 && clique.ranks > 1) return ncclInvalidUsage;
  ThisGroup().makes = ThisGroup().depth > 0;
  clique.windows.Register(Of(comm)->rank, buffer, size_bytes, flags, window);
  Of(comm)->asks = 1;
  return ThisGroup().depth > 0 ? ncclSuccess : ncclInProgress;
}
FAKE_NCCL ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (!IsThere(comm)) return ncclInvalidArgument;
  if (Fails("CommWindowDeregister")) return ncclInternalError;
  if (window == nullptr) return ncclSuccess;
  Clique& clique = *Of(comm)->clique;
  const std::lock_guard lock(clique.mutex);
  return clique.windows.Deregister(Of(comm)->rank, window);
}
FAKE_NCCL ncclResult_t ncclGroupStart() {
  ++ThisGroup().depth;
  return ncclSuccess;
}
FAKE_NCCL ncclResult_t ncclGroupEnd() {
  Group& group = ThisGroup();
  if (group.depth == 0) return ncclInvalidUsage;
  if (--group.depth > 0) return ncclSuccess;
  auto calls = std::exchange(group.calls, {});
  ncclResult_t result = std::exchange(group.makes, false) ? ncclInProgress : ncclSuccess;
  for (const auto& [id, made] : std::exchange(group.made, {})) {
    const std::lock_guard lock(g_mutex);
    if (const ncclResult_t joined = JoinOthers(id, made); joined != ncclSuccess) return joined;
  }
  for (auto& [comm, put] : calls) {
    result = Put(comm, put.first, std::move(put.second));
    if (result != ncclInProgress) return result;
  }
  return result;
}

}  // extern "C"

}  // namespace shardd::nccl

namespace shardd::fake_nccl {

nccl::Table Table() {
  nccl::Table table;
#define SHARDD_FAKE_NCCL_SET(name) table.name = &nccl::nccl##name;
  SHARDD_NCCL_FUNCTIONS(SHARDD_FAKE_NCCL_SET)
  SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_FAKE_NCCL_SET)
#undef SHARDD_FAKE_NCCL_SET
  return table;
}

}  // namespace shardd::fake_nccl
