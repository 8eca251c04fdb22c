#ifndef SHARDD_COMMON_SCHEDULE_REQUEST_ORDERS_H_
#define SHARDD_COMMON_SCHEDULE_REQUEST_ORDERS_H_

// The order of one job's requests: what each rank requests in the running step, the captured order that the first
// committed step leaves behind, and so which group is prefetched next.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "common/schedule/prefetch_order.h"

namespace shardd {

// What is prefetched behind a request of this kind: unshards of forward, of backward, or none.
std::optional<OrderEntry::Kind> PrefetchedBehind(OrderEntry::Kind kind, const v1::JobConfig& config);

// A request that does not fit the order that was expected of its rank.
struct Departure {
  int rank = 0;
  std::string fact;   // "departs from the recorded order (got Unshard (forward) a, want nothing more)"
  std::string event;  // what operators read of it; empty once a step has had kEventsPerStep of them
};

// Owns the trackers of all ranks, the captured order and the count of events. Loop-confined.
class RequestOrders {
 public:
  // A model whose order depends on its data departs all the time: all departures are counted, few become events.
  static constexpr int kEventsPerStep = 8;

  explicit RequestOrders(std::shared_ptr<const ShardPlan> plan);

  // Records the rank's request. Returns how it departs from the captured order; nothing if it fits or while no order is
  // captured.
  std::optional<Departure> Observe(int rank, const OrderEntry& entry);
  // As OrderTracker::NextUnshard.
  std::optional<int32_t> NextUnshard(int rank, OrderEntry::Kind kind) const {
    return trackers_[rank].NextUnshard(kind);
  }
  // AbandonBackward forgets the rank's requests since its last CloseBackward; they will come again.
  void CloseBackward(int rank) { trackers_[rank].Mark(); }
  void AbandonBackward(int rank) { trackers_[rank].Rewind(); }
  // The rank's later requests belong to its next step.
  void EndStep(int rank);
  // Forgets the rank's requests of the running step.
  void ForgetStep(int rank) { trackers_[rank].BeginStep(captured_.get()); }
  // Compares the ranks' orders with rank 0's while no order is captured, and stops at the first error of
  // `on_departure`, which it returns. REQUIRES: EndStep was called for all ranks.
  absl::Status CompareFirstStep(absl::FunctionRef<absl::Status(const Departure&)> on_departure);
  // The step that all ranks have ended is committed. The first one with requests becomes the captured order.
  void StepCommitted();
  // Forgets all requests of the running step. The captured order stays.
  void EndEpoch();

 private:
  std::string TextOf(const OrderEntry& entry) const;
  Departure Depart(int rank, std::string fact);

  const std::shared_ptr<const ShardPlan> plan_;
  std::unique_ptr<const CapturedOrder> captured_;     // null until the first step with requests was committed
  std::vector<OrderTracker> trackers_;                // by rank
  std::vector<std::vector<OrderEntry>> step_orders_;  // by rank: of the step that it has ended
  int events_ = 0;                                    // departures of this step that became events
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SCHEDULE_REQUEST_ORDERS_H_
