#ifndef SHARDD_SERVER_SCHEDULE_ORDER_H_
#define SHARDD_SERVER_SCHEDULE_ORDER_H_

// The order of requests: recorded in the first step, expected in the next ones. Nothing is paired by it (requests name
// their group): it drives prefetch, and departures from it are counted, shown and, in strict mode, refused.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardd {

struct OrderEntry {
  enum class Kind : uint8_t { kUnshardForward, kUnshardBackward, kSubmitGradients };
  Kind kind;
  int32_t group;
  friend bool operator==(const OrderEntry& a, const OrderEntry& b) { return a.kind == b.kind && a.group == b.group; }
};

// One rank's sequence in the running step against the job's captured one. Thread-compatible.
class OrderTracker {
 public:
  // `captured`: nullptr while the first step is being recorded; outlives the step.
  void BeginStep(const std::vector<OrderEntry>* captured) {
    captured_ = captured;
    sequence_.clear();
  }

  // The order was captured while this step was already under way (a rank that stepped early).
  void SetCaptured(const std::vector<OrderEntry>* captured) { captured_ = captured; }

  struct Observation {
    bool departed = false;
    std::optional<OrderEntry> expected;  // empty: nothing more was expected
  };
  // Notes a request. It departs when the captured order has something else at this position.
  Observation Observe(const OrderEntry& entry) {
    const size_t position = sequence_.size();
    sequence_.push_back(entry);
    Observation result;
    if (captured_ == nullptr) {
      return result;
    }
    if (position < captured_->size()) {
      result.expected = (*captured_)[position];
    }
    result.departed = !result.expected.has_value() || !(*result.expected == entry);
    return result;
  }

  // The next unshard after the last observed request in the captured order: what to prefetch. Empty when nothing is
  // captured, or when the last request departed (guessing further would be wrong more often than right), or when the
  // next unshard is of another phase than `kind`. Depends on the sequence alone, so all ranks decide alike.
  std::optional<int32_t> NextUnshard(OrderEntry::Kind kind) const {
    if (captured_ == nullptr || sequence_.empty() || sequence_.size() > captured_->size() ||
        !((*captured_)[sequence_.size() - 1] == sequence_.back())) {
      return std::nullopt;
    }
    for (size_t i = sequence_.size(); i < captured_->size(); ++i) {
      const OrderEntry& entry = (*captured_)[i];
      if (entry.kind == OrderEntry::Kind::kSubmitGradients) {
        continue;
      }
      if (entry.kind != kind) {
        return std::nullopt;
      }
      return entry.group;
    }
    return std::nullopt;
  }

  const std::vector<OrderEntry>& sequence() const { return sequence_; }

 private:
  const std::vector<OrderEntry>* captured_ = nullptr;
  std::vector<OrderEntry> sequence_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SCHEDULE_ORDER_H_
