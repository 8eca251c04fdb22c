#ifndef SHARDD_COMMON_SCHEDULE_PREFETCH_ORDER_H_
#define SHARDD_COMMON_SCHEDULE_PREFETCH_ORDER_H_

// The order of requests: recorded in the first step, expected in the next ones. Nothing is paired by it (requests name
// their group): it drives prefetch, and departures from it are counted, shown and, in strict mode, refused. Which
// step's order becomes the job's: RequestOrders (request_orders.h); who prefetches by it:
// server/job/unshard/unsharding.cc.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace shardd {

struct OrderEntry {
  enum class Kind : uint8_t { kUnshardForward, kUnshardBackward, kSubmitGradients };
  Kind kind;
  int32_t group;
  friend bool operator==(const OrderEntry& a, const OrderEntry& b) { return a.kind == b.kind && a.group == b.group; }
};

// A recorded order, indexed: what one request costs does not grow with its length, which a client chooses.
class CapturedOrder {
 public:
  explicit CapturedOrder(std::vector<OrderEntry> entries) : entries_(std::move(entries)) {
    next_unshard_.assign(entries_.size() + 1, entries_.size());
    for (size_t i = entries_.size(); i-- > 0;) {
      next_unshard_[i] = entries_[i].kind == OrderEntry::Kind::kSubmitGradients ? next_unshard_[i + 1] : i;
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      positions_[Key(entries_[i])].push_back(i);
    }
  }
  size_t size() const { return entries_.size(); }
  const OrderEntry& operator[](size_t i) const { return entries_[i]; }
  // The first place at or behind `from` with an equal entry; size() where there is none.
  size_t Find(const OrderEntry& entry, size_t from) const {
    const auto it = positions_.find(Key(entry));
    if (it == positions_.end()) {
      return size();
    }
    const auto at = std::lower_bound(it->second.begin(), it->second.end(), from);
    return at == it->second.end() ? size() : *at;
  }
  // The first unshard at or behind `from`; size() where there is none.
  size_t NextUnshard(size_t from) const { return next_unshard_[std::min(from, size())]; }

 private:
  static std::pair<int, int32_t> Key(const OrderEntry& entry) { return {static_cast<int>(entry.kind), entry.group}; }
  std::vector<OrderEntry> entries_;
  std::vector<size_t> next_unshard_;
  absl::flat_hash_map<std::pair<int, int32_t>, std::vector<size_t>> positions_;
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
  void BeginStep(const CapturedOrder* captured) {
    captured_ = captured;
    cursor_ = 0;
    fits_ = false;
    sequence_.clear();
    Mark();
  }
  // A backward is closed: where Rewind goes back to.
  void Mark() {
    marked_cursor_ = cursor_;
    marked_size_ = sequence_.size();
  }
  // What was observed since the last mark was given up by user code and will come again.
  void Rewind() {
    cursor_ = marked_cursor_;
    fits_ = false;
    sequence_.resize(marked_size_);
  }
  // The order was captured while this step was already under way (a rank that stepped early).
  void SetCaptured(const CapturedOrder* captured) {
    std::vector<OrderEntry> seen;
    seen.swap(sequence_);
    const size_t marked = marked_size_;
    BeginStep(captured);
    for (size_t i = 0; i < seen.size(); ++i) {
      if (i == marked) {
        Mark();
      }
      Observe(seen[i]);
    }
    if (marked == seen.size()) {
      Mark();
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
    const CapturedOrder& order = *captured_;
    if (cursor_ < order.size()) {
      result.expected = order[cursor_];
    }
    fits_ = true;
    if (cursor_ < order.size() && order[cursor_] == entry) {
      ++cursor_;
    } else if (order.size() > 0 && order[0] == entry) {
      cursor_ = 1;
    } else {
      fits_ = false;
      result.departed = true;
      if (const size_t next = order.Find(entry, cursor_); next != order.size()) {
        cursor_ = next + 1;
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
    const size_t next = captured_->NextUnshard(cursor_);
    if (next == captured_->size() || (*captured_)[next].kind != kind) {
      return std::nullopt;
    }
    return (*captured_)[next].group;
  }

  // What was observed while nothing was captured yet; at most kMaxRecorded, so that a job that never steps stays small.
  const std::vector<OrderEntry>& sequence() const { return sequence_; }
  static constexpr size_t kMaxRecorded = size_t{1} << 16;

 private:
  const CapturedOrder* captured_ = nullptr;
  size_t cursor_ = 0;
  size_t marked_cursor_ = 0;
  size_t marked_size_ = 0;  // of sequence_
  bool fits_ = false;       // the last request did
  std::vector<OrderEntry> sequence_;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SCHEDULE_PREFETCH_ORDER_H_
