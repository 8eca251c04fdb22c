#include "common/schedule/request_orders.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

std::optional<OrderEntry::Kind> PrefetchedBehind(OrderEntry::Kind kind, const v1::JobConfig& config) {
  switch (kind) {
    case OrderEntry::Kind::kUnshardForward:
      return config.forward_prefetch() ? std::optional(kind) : std::nullopt;
    case OrderEntry::Kind::kUnshardBackward:
      return config.backward_prefetch() == v1::BACKWARD_PREFETCH_PRE ? std::optional(kind) : std::nullopt;
    case OrderEntry::Kind::kSubmitGradients:
      return config.backward_prefetch() == v1::BACKWARD_PREFETCH_POST
                 ? std::optional(OrderEntry::Kind::kUnshardBackward)
                 : std::nullopt;
  }
  return std::nullopt;
}

RequestOrders::RequestOrders(std::shared_ptr<const ShardPlan> plan)
    : plan_(std::move(plan)), trackers_(plan_->world_size), step_orders_(plan_->world_size) {}

std::string RequestOrders::TextOf(const OrderEntry& entry) const {
  const char* kind = entry.kind == OrderEntry::Kind::kUnshardForward    ? "Unshard (forward) "
                     : entry.kind == OrderEntry::Kind::kUnshardBackward ? "Unshard (backward) "
                                                                        : "SubmitGradients ";
  return absl::StrCat(kind, plan_->groups[entry.group].name);
}

Departure RequestOrders::Depart(int rank, std::string fact) {
  Departure departure{rank, std::move(fact), ""};
  if (events_ < kEventsPerStep) {
    ++events_;
    departure.event =
        events_ < kEventsPerStep ? departure.fact : departure.fact + "; more of this step are only counted";
  }
  return departure;
}

std::optional<Departure> RequestOrders::Observe(int rank, const OrderEntry& entry) {
  const OrderTracker::Observation seen = trackers_[rank].Observe(entry);
  if (!seen.departed) {
    return std::nullopt;
  }
  return Depart(rank, absl::StrCat("departs from the recorded order (got ", TextOf(entry), ", want ",
                                   seen.expected.has_value() ? TextOf(*seen.expected) : "nothing more", ")"));
}

void RequestOrders::EndStep(int rank) {
  step_orders_[rank] = trackers_[rank].sequence();
  ForgetStep(rank);
}

absl::Status RequestOrders::CompareFirstStep(absl::FunctionRef<absl::Status(const Departure&)> on_departure) {
  if (captured_ != nullptr) {
    return absl::OkStatus();
  }
  const CapturedOrder first(step_orders_[0]);
  for (int rank = 1; rank < static_cast<int>(step_orders_.size()); ++rank) {
    OrderTracker tracker;
    tracker.BeginStep(&first);
    for (const OrderEntry& entry : step_orders_[rank]) {
      const OrderTracker::Observation seen = tracker.Observe(entry);
      if (!seen.departed) {
        continue;
      }
      SHARDD_RETURN_IF_ERROR(on_departure(Depart(
          rank,
          absl::StrCat("departs from rank 0's order in the first step (got group \"", plan_->groups[entry.group].name,
                       "\", want ",
                       seen.expected.has_value() ? absl::StrCat("\"", plan_->groups[seen.expected->group].name, "\"")
                                                 : "nothing more",
                       ")"))));
    }
  }
  return absl::OkStatus();
}

void RequestOrders::StepCommitted() {
  events_ = 0;
  if (captured_ != nullptr || step_orders_[0].empty()) {
    return;
  }
  captured_ = std::make_unique<const CapturedOrder>(step_orders_[0]);
  for (OrderTracker& tracker : trackers_) {
    tracker.SetCaptured(captured_.get());
  }
}

void RequestOrders::EndEpoch() {
  events_ = 0;
  for (int rank = 0; rank < static_cast<int>(trackers_.size()); ++rank) {
    ForgetStep(rank);
    step_orders_[rank].clear();
  }
}

}  // namespace shardd
