#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/cuda/driver.h"
#include "server/collective/nccl/nccl_library.h"
#include "server/device/device.h"
#include "server/device/device_memory.h"

namespace shardd {

// Whether the sum's parts from `first` on, one for each member, are one reduce-scatter: equal, in the members' order,
// one behind the other. It is all that NCCL's symmetric kernels do of sums; what has a root each goes along a ring.
bool ScattersAt(const SumOp& op, size_t first);

// Held while one sum's operations are submitted to their devices: all devices get those of all communicators in one
// order, so no two of these wait for each other.
absl::Mutex& NcclIssueMutex();

// NCCL over GPUs, one member each: all of this process, or some of it and the others of other processes (Share).
// Communicators are non-blocking, so that they can be aborted, and calls of one member come one at a time. Sums are of
// fp32 in NCCL's order, not in that of ranks.
class NcclCommunicator final : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
 public:
  struct Options {
    // Of making it, and of a call that NCCL has not finished: the issuing thread waits so long.
    absl::Duration limit = absl::Seconds(30);
    // A ring kernel holds so many multiprocessors at most, whatever the policy: trainers compute beside it.
    int max_ctas = 8;
    // It is one job's, which may register a window.
    bool takes_window = false;
  };
  using Slabs = std::vector<std::shared_ptr<const DeviceSlab>>;  // by member
  // One member per ordinal, in that order. Blocks, seconds on real GPUs. DEADLINE_EXCEEDED, INTERNAL: what NCCL said.
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals,
                                                                  const Options& options);
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(const NcclLibrary& library, const CudaDriver& driver,
                                                                  const std::vector<int>& ordinals) {
    return Create(library, driver, ordinals, Options());
  }
  // This process's part of a communicator over several processes. Its sums end on every member: it takes operations of
  // which each member's parts name that member as their root, and makes all-reduces of them.
  struct Share {
    nccl::UniqueId id = {};     // that one process has made, for all of them
    int members = 0;            // of all processes
    int first_member = 0;       // of this one's, which follow each other
    std::vector<int> ordinals;  // this one's GPUs
  };
  // Not made yet, and takes no sum until Join. May be broken meanwhile, from any thread, which ends Join.
  static std::shared_ptr<NcclCommunicator> Prepare(const NcclLibrary& library, const CudaDriver& driver, Share share,
                                                   const Options& options);
  // Makes them, in one group of calls, each by an id of its own. Blocks until every process has joined its members, or
  // one is broken, or it is late: DEADLINE_EXCEEDED. INTERNAL: what NCCL said. An error: Break of all is due. REQUIRES:
  // the same library and driver.
  static absl::Status Join(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  // REQUIRES: nothing is under way on the members' streams, or it is broken.
  ~NcclCommunicator() override;

  const std::string& name() const override { return name_; }
  const std::string& details() const override { return details_; }
  int members() const override { return share_.members; }
  absl::Status Enqueue(const SumOp& op, void* stream) override;
  void Break(const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status broken() const override ABSL_LOCKS_EXCLUDED(mutex_);
  // What the library has found out by itself of what is under way: UNAVAILABLE, a member of another process is gone, as
  // far as its network notices, or something else is wrong; Break is due. Does not block: OK where a member is busy.
  absl::Status Ask() ABSL_LOCKS_EXCLUDED(mutex_);

  bool takes_window() const { return options_.takes_window; }
  absl::Duration limit() const { return options_.limit; }
  // The slabs, each on its member's GPU and all of one size, become the symmetric window, of which there is one at a
  // time. It keeps them until it is deregistered, or aborted: NCCL finds a window by its addresses, which must not
  // become another slab's. NCCL has options.limit to get done; a call of it that does not return blocks for ever, and
  // so does the abort that Break has due. FAILED_PRECONDITION: there is none to be had, the text is the reason that
  // status shows, and all else works on. Other errors leave it in no state to sum: Break is due. REQUIRES: for these
  // two, no sum of any member is under way or enqueued meanwhile.
  absl::Status RegisterWindow(Slabs slabs) ABSL_LOCKS_EXCLUDED(mutex_);
  // Also without one. An error: Break is due, and takes the window along. OK where it is broken.
  absl::Status DeregisterWindow() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Member {
    std::string device;  // "cuda:0"
    cu::Ordinal ordinal = 0;
    cu::Context context = nullptr;
    absl::Mutex mutex;  // NCCL takes one call of a communicator at a time; an abort none beside it
    nccl::Comm comm ABSL_GUARDED_BY(mutex) = nullptr;  // null: aborted
    nccl::Window window ABSL_GUARDED_BY(mutex) = nullptr;
  };
  NcclCommunicator(const NcclLibrary& library, const CudaDriver& driver, Share share, bool is_shared,
                   const Options& options);
  static absl::Status JoinGroup(const std::vector<std::shared_ptr<NcclCommunicator>>& communicators);
  absl::Status JoinMembers();
  absl::Status EnqueueParts(const Member& member, nccl::Comm comm, const SumOp& op, void* stream);
  absl::Status RegisterOnAll(const Slabs& slabs) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status DeregisterOnAll() ABSL_LOCKS_EXCLUDED(mutex_);
  // False: it is broken. Else no abort begins until EndChange, which begins one that has become due meanwhile.
  bool BeginChange() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndChange() ABSL_LOCKS_EXCLUDED(mutex_);
  // Until the library has done what was called; DEADLINE_EXCEEDED after the limit, CANCELLED when it is broken
  // meanwhile.
  absl::Status Await(const std::string& device, nccl::Comm comm, const char* operation) ABSL_LOCKS_EXCLUDED(mutex_);
  // An abort may wait for GPUs, and for ever where one hangs: then its thread is left, and this with it.
  void BeginAbort();
  void AbortAll();

  // Constant after Prepare, but for the members' contexts, which are there after Join.
  const NcclLibrary library_;
  const CudaDriver driver_;
  const Share share_;     // all of it, where
  const bool is_shared_;  // this is false
  const Options options_;
  std::string name_;
  std::string details_;
  std::vector<std::unique_ptr<Member>> members_;

  // Guarded.
  mutable absl::Mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  bool is_changing_ ABSL_GUARDED_BY(mutex_) = false;  // it is made, or its window is changed
  Slabs slabs_ ABSL_GUARDED_BY(mutex_);               // of the window; empty: there is none
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COMMUNICATOR_H_
