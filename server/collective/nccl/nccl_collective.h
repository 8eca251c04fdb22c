#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/collective.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "server/collective/nccl/nccl_windows.h"

namespace shardd {

// Ranks on GPUs of their own, on this node. Sums of fp32 gradients that every rank submitted go through the
// communicator, into the slot of the rank whose part they are; its device then scales them into the gradient shards.
// Everything else is `local/`'s: gathers, other dtypes, what not every rank has, all while the communicator is broken.
// A job's ranks use the communicator with one stream each, and a request is one operation per device, so the order is
// that of requests. Where the communicator takes a window, gradient slots that SetSlots names are registered with it,
// and a group's sums that are reduce-scatters are made in it; requests wait for the registration. Thread-safe.
class NcclCollective final : public Collective {
 public:
  // Makes another communicator over the same devices; blocks. Outlives the collective.
  using Remake = std::function<absl::StatusOr<std::shared_ptr<NcclCommunicator>>()>;
  // devices[r] is rank r's and the communicator's member r. REQUIRES: as many devices as members. The first request
  // that finds the communicator broken has another one made, on a thread of its own, for the requests after that: the
  // epoch of what broke it is over by then, and GPUs that are lost have no requests. One that cannot be made is not
  // tried again, and the last of kMostRemakes that breaks, too, is the last: steps are not to end there for ever. Null:
  // never.
  static constexpr int kMostRemakes = 3;
  NcclCollective(std::vector<Device*> devices, std::shared_ptr<NcclCommunicator> communicator, Remake remake = nullptr);
  ~NcclCollective() override;  // requests that wait for a registration are done with CANCELLED
  const char* name() const override { return "nccl"; }
  std::string Describe() const override;
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override {
    local_.AllGather(std::move(request), std::move(done));
  }
  void SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) override;
  bool may_hold_requests() const override { return windows_ != nullptr; }

 private:
  // What the thread that makes another one needs, and this may be gone before it.
  struct Current {
    absl::Mutex mutex;
    std::shared_ptr<NcclCommunicator> communicator ABSL_GUARDED_BY(mutex);
    bool is_making ABSL_GUARDED_BY(mutex) = false;
    bool is_given_up ABSL_GUARDED_BY(mutex) = false;
    int made_anew ABSL_GUARDED_BY(mutex) = 0;
    std::string why ABSL_GUARDED_BY(mutex);  // of the last time
  };
  // Of a group's last sum, for status.
  struct Path {
    size_t parts = 0;   // each with a root, or of a reduce-scatter; none: all is added by copies
    size_t rooted = 0;  // of them, those with a root
    bool in_window = false;
  };
  // To be used, or null: local/ adds.
  std::shared_ptr<NcclCommunicator> Usable();
  // One in place of `current`, which is broken, to use from now on; null: it cannot be made, or nobody knows how, or
  // there is another one meanwhile.
  static std::shared_ptr<NcclCommunicator> Replace(Current& current, const Remake& remake);
  void Issue(ReduceScatterRequest request, Done done);
  void Note(const ReduceScatterRequest& request, const SumOp& sum) ABSL_LOCKS_EXCLUDED(paths_mutex_);
  std::string DescribePaths() const ABSL_LOCKS_EXCLUDED(paths_mutex_);

  const std::vector<Device*> devices_;
  const std::shared_ptr<Current> current_ = std::make_shared<Current>();
  const Remake remake_;
  LocalCollective local_;
  const std::shared_ptr<NcclWindows> windows_;  // null: the communicator takes none
  // Elements that were summed, each counted once.
  std::atomic<uint64_t> by_nccl_ = 0;
  std::atomic<uint64_t> by_copies_ = 0;
  mutable absl::Mutex paths_mutex_;
  absl::btree_map<std::string, Path> paths_ ABSL_GUARDED_BY(paths_mutex_);  // by the group's name
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
