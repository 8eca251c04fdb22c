#ifndef SHARDD_SERVER_COLLECTIVE_TRAINERS_TRAINER_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_TRAINERS_TRAINER_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/shm/sum_ring.h"
#include "server/collective/local/local_collective.h"

namespace shardd {

class Device;
class SumChannel;

// The trainers reduce (JobConfig.trainer_sums): the work that `local/` would give rank r's device goes to rank r's
// session, as records of its sum ring in the order of requests. The same operations with the same kernel give the same
// bits. The part of a rank without a session (it has finished) goes to its device. `local/` does the gathers.
//
// Records address memory through the plan: a session's gradient slots and slab "gradients" have the plan's layout.
//
// Loop-confined, unlike other collectives, because sessions and their rings are. `done` runs on the loop (from Poll or
// SetSession), or on a thread of a device if one had a part.
class TrainerCollective final : public Collective {
 public:
  // devices[r] is rank r's, as in LocalCollective; at most kMaxSumRanks.
  explicit TrainerCollective(std::vector<Device*> devices);
  const char* name() const override { return "trainers"; }
  std::string Describe() const override;
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override {
    local_.AllGather(std::move(request), std::move(done));
  }
  TrainerCollective* trainers() override { return this; }
  bool may_hold_requests() const override { return true; }

  // Gives the rank's part to this session; null: to its device. Requests that the previous session has not completed
  // end with ABORTED; the caller ensures that the old session writes nothing any more (SumChannel::idle).
  void SetSession(int rank, uint64_t session_id, std::shared_ptr<SumChannel> channel);
  // Checks what sessions have reduced, and sends them what fits. Returns true if a request is done.
  bool Poll();
  // True if Poll has something to check.
  bool waiting() const { return !requests_.empty(); }

  struct Late {
    int rank = -1;  // -1: none
    std::string what;
    absl::Duration since;
    uint64_t summed = 0;
    uint64_t told = 0;
  };
  // The rank that has been waited for longest, if for at least `limit`.
  Late FindLate(absl::Time now, absl::Duration limit);

 private:
  struct Rank {
    uint64_t session_id = 0;
    std::shared_ptr<SumChannel> channel;  // null: none
    std::deque<SumRecord> queue;          // records that wait for room
    uint64_t told = 0;                    // queued or written, in this session
    uint64_t summed = 0;
    // Unfinished operations on the device; later ones follow them in order.
    std::shared_ptr<std::atomic<int>> on_device = std::make_shared<std::atomic<int>>(0);
    bool by_session() const { return channel != nullptr && on_device->load(std::memory_order_acquire) == 0; }
  };
  // What ranks' sessions have to do for one request.
  struct Request {
    std::string label;
    absl::Time since;
    std::vector<uint64_t> ends;  // by rank: `summed` when its part is done; 0: it has none
    Done done;
  };
  absl::Status Tell(int rank, const ReduceScatterRequest& request, const std::vector<ReduceRun>& runs);
  absl::Status TellOps(int rank, const ReduceScatterRequest& request, const std::vector<DeviceOp>& ops,
                       const ReduceRun* run);
  void Write(Rank& rank);
  void Fail(int rank, const absl::Status& status);

  const std::vector<Device*> devices_;
  LocalCollective local_;
  std::vector<Rank> ranks_;
  std::list<Request> requests_;
  uint64_t by_trainers_ = 0;  // operations
  uint64_t by_devices_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_TRAINERS_TRAINER_COLLECTIVE_H_
