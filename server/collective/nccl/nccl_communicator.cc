#include "server/collective/nccl/nccl_communicator.h"

#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/clock/deadline.h"
#include "common/status/status_macros.h"
#include "server/device/device_memory.h"

namespace shardd {
namespace {

constexpr absl::Duration kAskInterval = absl::Microseconds(50);

}  // namespace

bool ScattersAt(const SumOp& op, size_t first) {
  const size_t members = static_cast<size_t>(op.communicator->members());
  if (op.scatter) return first == 0;
  if (members < 2 || op.parts.size() - first < members) return false;
  const SumPart& begin = op.parts[first];
  for (size_t member = 0; member < members; ++member) {
    const SumPart& part = op.parts[first + member];
    if (part.root != static_cast<int>(member) || part.numel != begin.numel ||
        part.src != begin.src + static_cast<int64_t>(member) * begin.numel) {
      return false;
    }
  }
  return true;
}

absl::Mutex& NcclIssueMutex() {
  static absl::Mutex mutex(absl::kConstInit);
  return mutex;
}

NcclCommunicator::NcclCommunicator(const NcclLibrary& library, const CudaDriver& driver, Share share, bool is_shared,
                                   const Options& options)
    : library_(library), driver_(driver), share_(std::move(share)), is_shared_(is_shared), options_(options) {
  std::vector<std::string> devices;
  for (const int ordinal : share_.ordinals) {
    auto member = std::make_unique<Member>();
    member->device = absl::StrCat("cuda:", ordinal);
    member->ordinal = ordinal;
    devices.push_back(member->device);
    members_.push_back(std::move(member));
  }
  name_ = absl::StrCat("nccl ", library_.version(), " over ", absl::StrJoin(devices, ", "));
  if (is_shared_) {
    absl::StrAppend(&name_, " (member ", share_.first_member, " of ", share_.members, ", others of other processes)");
  }
  details_ = absl::StrCat("at most ", options_.max_ctas, " CTAs on each GPU, CTA policy ", library_.cta_policy_text());
}

absl::StatusOr<std::shared_ptr<NcclCommunicator>> NcclCommunicator::Create(const NcclLibrary& library,
                                                                           const CudaDriver& driver,
                                                                           const std::vector<int>& ordinals,
                                                                           const Options& options) {
  Share share;
  share.members = static_cast<int>(ordinals.size());
  share.ordinals = ordinals;
  SHARDD_RETURN_IF_ERROR(library.Check(library->GetUniqueId(&share.id), "ncclGetUniqueId", "nccl"));
  std::shared_ptr<NcclCommunicator> result(
      new NcclCommunicator(library, driver, std::move(share), /*is_shared=*/false, options));
  if (absl::Status status = Join({result}); !status.ok()) {
    // A call that hangs during creation may also hang in the abort, and this thread has others to serve.
    result->Break(status);
    return status;
  }
  return result;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::Prepare(const NcclLibrary& library, const CudaDriver& driver,
                                                            Share share, const Options& options) {
  return std::shared_ptr<NcclCommunicator>(
      new NcclCommunicator(library, driver, std::move(share), /*is_shared=*/true, options));
}

absl::Status NcclCommunicator::Join(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators) {
  size_t begun = 0;  // these cannot be aborted before the group has ended
  while (begun < communicators.size() && communicators[begun]->BeginChange()) ++begun;
  absl::Status status = begun == communicators.size() ? JoinGroup(communicators) : communicators[begun]->broken();
  for (size_t i = 0; i < begun; ++i) communicators[i]->EndChange();
  return status;
}

// Members of one communicator in one process wait for each other, so their calls must form a group; different
// communicators do not wait, and are made at the same time.
absl::Status NcclCommunicator::JoinGroup(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators) {
  if (communicators.empty()) return absl::OkStatus();
  const NcclLibrary& library = communicators[0]->library_;
  SHARDD_RETURN_IF_ERROR(library.Check(library->GroupStart(), "ncclGroupStart", communicators[0]->name_));
  absl::Status status;
  for (const auto& communicator : communicators) status.Update(communicator->JoinMembers());
  status.Update(library.Check(library->GroupEnd(), "ncclGroupEnd", communicators[0]->name_));
  SHARDD_RETURN_IF_ERROR(status);
  for (const auto& communicator : communicators) {
    for (const auto& member : communicator->members_) {
      absl::MutexLock lock(&member->mutex);
      SHARDD_RETURN_IF_ERROR(communicator->Await(member->device, member->comm, "ncclCommInitRankConfig"));
    }
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::JoinMembers() {
  absl::Status status;
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = *members_[i];
    absl::MutexLock lock(&member.mutex);
    SHARDD_RETURN_IF_ERROR(driver_.Check(driver_->DevicePrimaryCtxRetain(&member.context, member.ordinal),
                                         "cuDevicePrimaryCtxRetain", "", member.device));
    const ScopedCudaContext current(driver_, member.context);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = options_.max_ctas;
    config.CTAPolicy = library_.cta_policy();
    status.Update(driver_.Check(current.result(), "cuCtxPushCurrent", "", member.device));
    status.Update(library_.Check(library_->CommInitRankConfig(&member.comm, share_.members, share_.id,
                                                              share_.first_member + static_cast<int>(i), &config),
                                 "ncclCommInitRankConfig", member.device));
  }
  return status;
}

absl::Status NcclCommunicator::Await(const std::string& device, ncclComm_t comm, const char* operation) {
  const Deadline limit = Deadline::In(options_.limit);
  while (true) {
    const bool late = limit.HasPassed();  // checked before asking, so that a process that was stopped asks once more
    ncclResult_t result = ncclSuccess;
    SHARDD_RETURN_IF_ERROR(library_.Check(library_->CommGetAsyncError(comm, &result), "ncclCommGetAsyncError", device));
    if (result != ncclInProgress) return library_.Check(result, operation, device);
    if (late) {
      return absl::DeadlineExceededError(absl::StrCat(operation, " on ", device, ": not done after ",
                                                      absl::FormatDuration(options_.limit), " (", name_, ")"));
    }
    if (absl::Status status = broken(); !status.ok()) return status;
    absl::SleepFor(kAskInterval);
  }
}

absl::Status NcclCommunicator::EnqueueParts(const Member& member, ncclComm_t comm, const SumOp& op,
                                            cudaStream_t stream) {
  const auto numel = [](const SumPart& part) { return static_cast<size_t>(part.numel); };
  SHARDD_RETURN_IF_ERROR(library_.Check(library_->GroupStart(), "ncclGroupStart", member.device));
  absl::Status status;
  for (size_t i = 0; i < op.parts.size();) {
    const SumPart& part = op.parts[i];
    if (part.root == kAllMembers) {
      status.Update(
          library_.Check(library_->AllReduce(part.src, part.dst, numel(part), ncclFloat32, ncclSum, comm, stream),
                         "ncclAllReduce", member.device));
      ++i;
      continue;
    }
    if (ScattersAt(op, i)) {
      const SumPart& own = op.parts[i + static_cast<size_t>(op.member)];
      status.Update(
          library_.Check(library_->ReduceScatter(part.src, own.dst, numel(own), ncclFloat32, ncclSum, comm, stream),
                         "ncclReduceScatter", member.device));
      i += static_cast<size_t>(members());
      continue;
    }
    status.Update(library_.Check(library_->Reduce(part.src, part.root == op.member ? part.dst : nullptr, numel(part),
                                                  ncclFloat32, ncclSum, part.root, comm, stream),
                                 "ncclReduce", member.device));
    ++i;
  }
  status.Update(library_.Check(library_->GroupEnd(), "ncclGroupEnd", member.device));
  return status;
}

absl::Status NcclCommunicator::Enqueue(const SumOp& op, void* on) {
  auto* const stream = static_cast<cudaStream_t>(on);
  const bool on_all = !op.parts.empty() && op.parts[0].root == kAllMembers;
  return EnqueueCalls(op.member,
                      on_all       ? "ncclAllReduce"
                      : op.scatter ? "ncclReduceScatter"
                                   : "ncclReduce",
                      [&](const Member& member, ncclComm_t comm) { return EnqueueParts(member, comm, op, stream); });
}

absl::Status NcclCommunicator::Enqueue(const MoveOp& op, void* on) {
  auto* const stream = static_cast<cudaStream_t>(on);
  return EnqueueCalls(op.member, "ncclSend and ncclRecv", [&](const Member& member, ncclComm_t comm) {
    // In one group, so that none waits for another.
    SHARDD_RETURN_IF_ERROR(library_.Check(library_->GroupStart(), "ncclGroupStart", member.device));
    absl::Status status;
    for (const MoveOp::Move& move : op.moves) {
      const auto bytes = static_cast<size_t>(move.size_bytes);
      status.Update(move.src != nullptr
                        ? library_.Check(library_->Send(move.src, bytes, ncclInt8, move.peer, comm, stream), "ncclSend",
                                         member.device)
                        : library_.Check(library_->Recv(move.dst, bytes, ncclInt8, move.peer, comm, stream), "ncclRecv",
                                         member.device));
    }
    status.Update(library_.Check(library_->GroupEnd(), "ncclGroupEnd", member.device));
    return status;
  });
}

absl::Status NcclCommunicator::EnqueueCalls(int of_member, const char* operation,
                                            absl::FunctionRef<absl::Status(const Member&, ncclComm_t)> calls) {
  const int index = of_member - share_.first_member;
  if (index < 0 || static_cast<size_t>(index) >= members_.size()) {
    return absl::InternalError(
        absl::StrCat(operation, ": member ", of_member, " is not of this process (", name_, ")"));
  }
  Member& member = *members_[static_cast<size_t>(index)];
  absl::MutexLock lock(&member.mutex);
  SHARDD_RETURN_IF_ERROR(broken());
  if (member.comm == nullptr) {
    return absl::InternalError(absl::StrCat(operation, " on ", member.device, ": no communicator"));
  }
  SHARDD_RETURN_IF_ERROR(calls(member, member.comm));
  // The stream must not be touched while NCCL still puts its work there.
  return Await(member.device, member.comm, operation);
}

absl::Status NcclCommunicator::Ask() {
  for (const auto& member : members_) {
    if (!member->mutex.TryLock()) continue;
    ncclResult_t result = ncclSuccess;
    absl::Status status;
    if (member->comm != nullptr) {
      status =
          library_.Check(library_->CommGetAsyncError(member->comm, &result), "ncclCommGetAsyncError", member->device);
    }
    member->mutex.Unlock();
    status.Update(library_.Check(result, "a sum on", member->device));
    if (!status.ok()) return absl::UnavailableError(absl::StrCat(status.message(), " (", name_, ")"));
  }
  return absl::OkStatus();
}

bool NcclCommunicator::BeginChange() {
  absl::MutexLock lock(&mutex_);
  if (!broken_.ok()) return false;
  is_changing_ = true;
  return true;
}

void NcclCommunicator::EndChange() {
  {
    absl::MutexLock lock(&mutex_);
    is_changing_ = false;
    if (broken_.ok()) return;
  }
  BeginAbort();
}

absl::Status NcclCommunicator::RegisterWindow(Slabs slabs) {
  const auto refuse = [](const auto&... why) { return absl::FailedPreconditionError(absl::StrCat(why...)); };
  if (!library_.has_windows()) return refuse("NCCL ", library_.version(), " has no ncclCommWindowRegister");
  if (slabs.size() != members_.size()) return refuse("got ", slabs.size(), " slabs for ", members(), " GPUs");
  for (size_t i = 0; i < slabs.size(); ++i) {
    const std::string what = absl::StrCat("the slab on ", members_[i]->device);
    if (slabs[i] == nullptr) return refuse(what, " is not there");
    if (slabs[i]->size_bytes() != slabs[0]->size_bytes()) {
      return refuse(what, " is of another size than the first (got ", slabs[i]->size_bytes(), " bytes, want ",
                    slabs[0]->size_bytes(), ")");
    }
    if (reinterpret_cast<uintptr_t>(slabs[i]->data()) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
      return refuse(what, " begins at no multiple of ", NCCL_WIN_REQUIRED_ALIGNMENT, " bytes");
    }
  }
  if (!BeginChange()) return broken();
  {
    absl::MutexLock lock(&mutex_);
    slabs_ = slabs;
  }
  const absl::Status status = RegisterOnAll(slabs);
  if (absl::IsFailedPrecondition(status)) {
    absl::MutexLock lock(&mutex_);
    slabs_.clear();
  }
  EndChange();
  return status;
}

// All members in one group: each waits for the others' registrations.
absl::Status NcclCommunicator::RegisterOnAll(const Slabs& slabs) {
  SHARDD_RETURN_IF_ERROR(library_.Check(library_->GroupStart(), "ncclGroupStart", name_));
  absl::Status status;
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = *members_[i];
    const ScopedCudaContext current(driver_, member.context);
    absl::MutexLock lock(&member.mutex);
    status.Update(driver_.Check(current.result(), "cuCtxPushCurrent", "", member.device));
    status.Update(library_.Check(
        library_->CommWindowRegister(member.comm, slabs[i]->data(), static_cast<size_t>(slabs[i]->size_bytes()),
                                     &member.window, NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister", member.device));
  }
  status.Update(library_.Check(library_->GroupEnd(), "ncclGroupEnd", name_));
  SHARDD_RETURN_IF_ERROR(status);
  size_t windows = 0;
  for (const auto& member : members_) {
    absl::MutexLock lock(&member->mutex);
    SHARDD_RETURN_IF_ERROR(Await(member->device, member->comm, "ncclCommWindowRegister"));
    windows += member->window != nullptr ? 1 : 0;
  }
  if (windows == members_.size()) return absl::OkStatus();
  if (windows > 0) {
    return absl::InternalError(absl::StrCat("ncclCommWindowRegister: ", windows, " of ", members(), " windows"));
  }
  return absl::FailedPreconditionError(
      "NCCL has no symmetric memory over these GPUs (they do not all reach each other, or NCCL_WIN_ENABLE or "
      "NCCL_CUMEM_ENABLE is 0)");
}

absl::Status NcclCommunicator::DeregisterWindow() {
  if (!BeginChange()) return absl::OkStatus();  // an abort has it, or will
  const absl::Status status = DeregisterOnAll();
  Slabs slabs;  // released without the lock
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    slabs.swap(slabs_);
  }
  EndChange();
  return status;
}

absl::Status NcclCommunicator::DeregisterOnAll() {
  for (const auto& member : members_) {
    const ScopedCudaContext current(driver_, member->context);
    absl::MutexLock lock(&member->mutex);
    if (member->window == nullptr) continue;
    SHARDD_RETURN_IF_ERROR(driver_.Check(current.result(), "cuCtxPushCurrent", "", member->device));
    SHARDD_RETURN_IF_ERROR(library_.Check(library_->CommWindowDeregister(member->comm, member->window),
                                          "ncclCommWindowDeregister", member->device));
    member->window = nullptr;
    SHARDD_RETURN_IF_ERROR(Await(member->device, member->comm, "ncclCommWindowDeregister"));
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::broken() const {
  absl::MutexLock lock(&mutex_);
  return broken_;
}

void NcclCommunicator::Break(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (!broken_.ok()) return;
    broken_ = absl::AbortedError(absl::StrCat(name_.empty() ? "nccl" : name_, " is given up: ", why.message()));
    // NCCL takes no abort beside a call over the same members. The thread that makes the communicator or changes its
    // window notices that it is broken, leaves, and begins the abort. If its call does not return there is no abort,
    // and nobody waits for one: no sum is under way.
    if (is_changing_) return;
  }
  BeginAbort();
}

void NcclCommunicator::BeginAbort() {
  std::thread([self = shared_from_this()] { self->AbortAll(); }).detach();
}

// All members at once: NCCL may wait in one for the others.
void NcclCommunicator::AbortAll() {
  std::vector<std::thread> threads;
  threads.reserve(members_.size());
  for (const auto& member : members_) {
    threads.emplace_back([this, member = member.get()] {
      const ScopedCudaContext current(driver_, member->context);
      absl::MutexLock lock(&member->mutex);  // a thread in a call sees that it is broken, and leaves
      if (member->comm != nullptr) (void)library_->CommAbort(member->comm);
      member->comm = nullptr;
      member->window = nullptr;
    });
  }
  for (std::thread& thread : threads) thread.join();
  Slabs slabs;  // released without the lock
  absl::MutexLock lock(&mutex_);
  slabs.swap(slabs_);
}

NcclCommunicator::~NcclCommunicator() {
  for (const auto& member : members_) {
    {
      const ScopedCudaContext current(driver_, member->context);
      absl::MutexLock lock(&member->mutex);
      // A communicator with members elsewhere must not wait for them.
      if (member->comm != nullptr) {
        (void)(is_shared_ ? library_->CommAbort(member->comm) : library_->CommDestroy(member->comm));
      }
    }
    if (member->context != nullptr) (void)driver_->DevicePrimaryCtxRelease(member->ordinal);
  }
}

}  // namespace shardd
