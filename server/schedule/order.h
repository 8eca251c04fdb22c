#ifndef SHARDD_SERVER_SCHEDULE_ORDER_H_
#define SHARDD_SERVER_SCHEDULE_ORDER_H_

// The order of requests: recorded in the first step, expected in the next ones. Nothing is paired by it (requests name
// their group): it drives prefetch, and departures from it are counted, shown and, in strict mode, refused.

#include <algorithm>
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

// One rank's requests in the running step against the job's captured order. Thread-compatible.
//
// A cursor stands at the entry that is expected next. What fits moves it on. What does not is a departure, after which
// the cursor goes behind the next entry that is equal, or stays where there is none: two swapped groups are two
// departures and a group left out is one. The order's first entry always fits: it begins a pass, so that an evaluation
// between steps, or a forward that user code gave up half-way, departs from nothing.
class OrderTracker {
 public:
  // `captured`: nullptr while the first step is being recorded; outlives the step.
  void BeginStep(const std::vector<OrderEntry>* captured) {
    captured_ = captured;
    cursor_ = 0;
    fits_ = false;
    sequence_.clear();
  }
  // The order was captured while this step was already under way (a rank that stepped early).
  void SetCaptured(const std::vector<OrderEntry>* captured) {
    std::vector<OrderEntry> seen;
    seen.swap(sequence_);
    BeginStep(captured);
    for (const OrderEntry& entry : seen) {
      Observe(entry);
    }
  }

  struct Observation {
    bool departed = false;
    std::optional<OrderEntry> expected;  // empty: nothing more was expected
  };
  Observation Observe(const OrderEntry& entry) {
    Observation result;
    if (captured_ == nullptr) {
      if (sequence_.size() < kMaxRecorded) {
        sequence_.push_back(entry);
      }
      return result;
    }
    const std::vector<OrderEntry>& order = *captured_;
    if (cursor_ < order.size()) {
      result.expected = order[cursor_];
    }
    fits_ = true;
    if (cursor_ < order.size() && order[cursor_] == entry) {
      ++cursor_;
    } else if (!order.empty() && order[0] == entry) {
      cursor_ = 1;
    } else {
      fits_ = false;
      result.departed = true;
      const auto next = std::find(order.begin() + static_cast<std::ptrdiff_t>(cursor_), order.end(), entry);
      if (next != order.end()) {
        cursor_ = static_cast<size_t>(next - order.begin()) + 1;
      }
    }
    return result;
  }

  // The next unshard in the captured order: what to prefetch. Empty when nothing is captured, or when the last request
  // departed (guessing further would be wrong more often than right), or when the next unshard is of another phase than
  // `kind`. Depends on the sequence alone, so all ranks decide alike.
  std::optional<int32_t> NextUnshard(OrderEntry::Kind kind) const {
    if (captured_ == nullptr || !fits_) {
      return std::nullopt;
    }
    for (size_t i = cursor_; i < captured_->size(); ++i) {
      const OrderEntry& entry = (*captured_)[i];
      if (entry.kind == OrderEntry::Kind::kSubmitGradients) {
        continue;
      }
      return entry.kind == kind ? std::optional<int32_t>(entry.group) : std::nullopt;
    }
    return std::nullopt;
  }

  // What was observed while nothing was captured yet; at most kMaxRecorded, so that a job that never steps stays small.
  const std::vector<OrderEntry>& sequence() const { return sequence_; }
  static constexpr size_t kMaxRecorded = size_t{1} << 20;

 private:
  const std::vector<OrderEntry>* captured_ = nullptr;
  size_t cursor_ = 0;
  bool fits_ = false;  // the last request did
  std::vector<OrderEntry> sequence_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SCHEDULE_ORDER_H_
