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

class DeviceSlab;

// Reduces with NCCL, for ranks of this node with a GPU each. fp32 gradients that every rank submitted are summed by the
// communicator, into the slot of the rank that works on them; its device then scales them into the gradient shards.
// `local/` does the rest: gathers, other dtypes, gradients that some rank lacks, and everything while the communicator
// is broken. A job's ranks use the communicator with one stream each, and a request is one operation per device, so
// operations run in the order of requests. If the communicator takes a window, the gradient slots from SetSlots are
// registered with it and a group's reduce-scatters run in it; requests wait for the registration. Thread-safe.
class NcclCollective final : public Collective {
 public:
  // Makes another communicator over the same devices; blocks. Must outlive the collective.
  using Remake = std::function<absl::StatusOr<std::shared_ptr<NcclCommunicator>>()>;
  // devices[r] is rank r's and the communicator's member r. REQUIRES: as many devices as members. The first request
  // that finds the communicator broken has another one made, on a separate thread, for later requests: the epoch of the
  // failure is over by then, and lost GPUs get no requests. One that cannot be made is not tried again, and after
  // kMostRemakes no more are made, so that steps do not fail for ever. `remake` null: never.
  static constexpr int kMostRemakes = 3;
  NcclCollective(std::vector<Device*> devices, std::shared_ptr<NcclCommunicator> communicator, Remake remake = nullptr);
  ~NcclCollective() override;  // ends requests that wait for a registration with CANCELLED
  const char* name() const override { return "nccl"; }
  std::string Describe() const override;
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override {
    local_.AllGather(std::move(request), std::move(done));
  }
  void SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) override;
  bool may_hold_requests() const override { return windows_ != nullptr; }

 private:
  // State that the thread which makes another communicator needs; it may outlive the collective.
  struct Current {
    absl::Mutex mutex;
    std::shared_ptr<NcclCommunicator> communicator ABSL_GUARDED_BY(mutex);
    bool is_making ABSL_GUARDED_BY(mutex) = false;
    bool is_given_up ABSL_GUARDED_BY(mutex) = false;
    int made_anew ABSL_GUARDED_BY(mutex) = 0;
    std::string why ABSL_GUARDED_BY(mutex);  // of the last failure
  };
  // For status: how a group's last reduction ran.
  struct Path {
    size_t parts = 0;   // each with a root, or of a reduce-scatter; 0: copies did it all
    size_t rooted = 0;  // those of them with a root
    bool in_window = false;
  };
  // The communicator to use, or null: local/ reduces.
  std::shared_ptr<NcclCommunicator> Usable();
  // Makes a communicator to replace `current`, which is broken. Null: it cannot be made, `remake` is null, or it has
  // been replaced meanwhile.
  static std::shared_ptr<NcclCommunicator> Replace(Current& current, const Remake& remake);
  void Issue(ReduceScatterRequest request, Done done);
  void Note(const ReduceScatterRequest& request, const SumOp& sum) ABSL_LOCKS_EXCLUDED(paths_mutex_);
  std::string DescribePaths() const ABSL_LOCKS_EXCLUDED(paths_mutex_);

  const std::vector<Device*> devices_;
  const std::shared_ptr<Current> current_ = std::make_shared<Current>();
  const Remake remake_;
  LocalCollective local_;
  const std::shared_ptr<NcclWindows> windows_;  // null: the communicator takes no windows
  // Elements reduced, each counted once.
  std::atomic<uint64_t> by_nccl_ = 0;
  std::atomic<uint64_t> by_copies_ = 0;
  mutable absl::Mutex paths_mutex_;
  absl::btree_map<std::string, Path> paths_ ABSL_GUARDED_BY(paths_mutex_);  // by name of the group
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
