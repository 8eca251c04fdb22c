#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/cuda/driver.h"
#include "server/collective/nccl/nccl_library.h"
#include "server/device/device.h"

namespace shardd {

class DeviceSlab;

// Whether the sum's parts from `first` on, one per member, form one reduce-scatter: equal, adjacent, in the members'
// order. NCCL's symmetric kernels do no other sums; parts with separate roots go along a ring.
bool ScattersAt(const SumOp& op, size_t first);

// Hold this while submitting one sum's operations to their devices: all devices then get the operations of all
// communicators in one order, so no two sums wait for each other.
absl::Mutex& NcclIssueMutex();

// NCCL over GPUs, one member each: all in this process, or some here and the others in other processes (Share).
// Communicators are non-blocking, so that they can be aborted, and calls of one member are serialised. Sums are fp32,
// in NCCL's order instead of rank order.
class NcclCommunicator final : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
 public:
  struct Options {
    // Limit for making it, and for a call that NCCL has not finished: the issuing thread waits that long.
    absl::Duration limit = absl::Seconds(30);
    // Most multiprocessors of a ring kernel, whatever the policy: trainers compute beside it.
    int max_ctas = 8;
    // It belongs to one job, which may register a window.
    bool takes_window = false;
  };
  using Slabs = std::vector<std::shared_ptr<const DeviceSlab>>;  // by member
  // Makes one member per ordinal, in that order. Blocks, for seconds on real GPUs. DEADLINE_EXCEEDED, INTERNAL: NCCL's
  // error.
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals,
                                                                  const Options& options);
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals) {
    return Create(library, driver, ordinals, Options());
  }
  // This process's part of a communicator over several processes.
  struct Share {
    ncclUniqueId id = {};       // one process has made it for all of them
    int members = 0;            // in all processes
    int first_member = 0;       // of this process, whose members are adjacent
    std::vector<int> ordinals;  // GPUs of this process
  };
  // Returns a communicator that takes no sum until Join. It may be broken meanwhile, from any thread, which ends Join.
  static std::shared_ptr<NcclCommunicator> Prepare(const NcclLibrary& library, const CudaDriver& driver, Share share,
                                                   const Options& options);
  // Makes them in one group of calls, each by its own id. Blocks until every process has joined its members, one is
  // broken, or the limit passes: DEADLINE_EXCEEDED. INTERNAL: NCCL's error. After an error, call Break on all.
  // REQUIRES: the same library and driver.
  static absl::Status Join(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  // REQUIRES: no work is under way on the members' streams, or it is broken.
  ~NcclCommunicator() override;

  const std::string& name() const override { return name_; }
  const std::string& details() const override { return details_; }
  int members() const override { return share_.members; }
  absl::Status Enqueue(const SumOp& op, void* stream) override;
  absl::Status Enqueue(const MoveOp& op, void* stream) override;
  void Break(const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status broken() const override ABSL_LOCKS_EXCLUDED(mutex_);
  // What the library itself has noticed about the work under way: UNAVAILABLE if a member of another process is gone
  // (as far as its network notices) or something else is wrong; then call Break. Does not block: OK while a member is
  // busy.
  absl::Status Ask() ABSL_LOCKS_EXCLUDED(mutex_);

  bool takes_window() const { return options_.takes_window; }
  absl::Duration limit() const { return options_.limit; }
  // Makes the slabs, each on its member's GPU and all of one size, the symmetric window; there is one at a time. Keeps
  // them until the window is deregistered or aborted: NCCL finds a window by its addresses, which must not become
  // another slab's. NCCL has options.limit to finish; a call of it that does not return blocks for ever, and so does
  // the abort after Break. FAILED_PRECONDITION: windows are not available here (the text is shown in status), and all
  // else works. After any other error it cannot sum: call Break. REQUIRES, for both: no sum of any member is enqueued
  // or under way meanwhile.
  absl::Status RegisterWindow(Slabs slabs) ABSL_LOCKS_EXCLUDED(mutex_);
  // OK also without a window, and if it is broken. After an error, call Break, which drops the window.
  absl::Status DeregisterWindow() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Member {
    std::string device;  // "cuda:0"
    CUdevice ordinal = 0;
    CUcontext context = nullptr;
    absl::Mutex mutex;  // NCCL takes one call of a communicator at a time, and no call beside an abort
    ncclComm_t comm ABSL_GUARDED_BY(mutex) = nullptr;  // null: aborted
    ncclWindow_t window ABSL_GUARDED_BY(mutex) = nullptr;
  };
  NcclCommunicator(const NcclLibrary& library, const CudaDriver& driver, Share share, bool is_shared,
                   const Options& options);
  static absl::Status JoinGroup(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators);
  absl::Status JoinMembers();
  // Runs `calls` on the member's communicator, and waits until the library has finished them.
  absl::Status EnqueueCalls(int of_member, const char* operation,
                            absl::FunctionRef<absl::Status(const Member&, ncclComm_t)> calls);
  absl::Status EnqueueParts(const Member& member, ncclComm_t comm, const SumOp& op, cudaStream_t stream);
  absl::Status RegisterOnAll(const Slabs& slabs) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status DeregisterOnAll() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if it is broken. Otherwise no abort begins before EndChange, which begins one that has become due.
  bool BeginChange() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndChange() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the library has finished the call. DEADLINE_EXCEEDED: the limit has passed. CANCELLED: it was broken
  // meanwhile.
  absl::Status Await(const std::string& device, ncclComm_t comm, const char* operation) ABSL_LOCKS_EXCLUDED(mutex_);
  // An abort may wait for GPUs, and for ever if one hangs; then its thread, and this object, are leaked.
  void BeginAbort();
  void AbortAll();

  // Constant after Prepare, except for the members' contexts, which exist after Join.
  const NcclLibrary library_;
  const CudaDriver driver_;
  const Share share_;     // all of it, if
  const bool is_shared_;  // this is false
  const Options options_;
  std::string name_;
  std::string details_;
  std::vector<std::unique_ptr<Member>> members_;

  // Guarded.
  mutable absl::Mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  bool is_changing_ ABSL_GUARDED_BY(mutex_) = false;  // it is being made, or its window changes
  Slabs slabs_ ABSL_GUARDED_BY(mutex_);               // of the window; empty: none
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
