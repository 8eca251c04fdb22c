#include "server/observe/events.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardd {
namespace {

constexpr int kDefaultLimit = 100;

// Cuts at a character boundary, because a proto string must be valid UTF-8.
void CutText(std::string* text, size_t max_bytes) {
  if (text->size() <= max_bytes) {
    return;
  }
  size_t end = max_bytes - 3;
  while (end > 0 && (static_cast<unsigned char>((*text)[end]) & 0xC0) == 0x80) {
    --end;
  }
  text->resize(end);
  text->append("...");
}

}  // namespace

void EventLog::Add(absl::string_view job, const Tenant& owner, uint64_t epoch, int64_t step, int rank,
                   absl::string_view kind, std::string text) {
  CutText(&text, kMaxTextBytes);
  Entry entry;
  entry.owner = owner;
  entry.event.set_job(std::string(job));
  entry.event.set_epoch(epoch);
  entry.event.set_step(step);
  entry.event.set_rank(rank);
  entry.event.set_kind(std::string(kind));
  entry.event.set_text(std::move(text));
  absl::MutexLock lock(&mutex_);
  // Under the mutex, so that times and sequence numbers have the same order.
  entry.event.set_unix_us(absl::ToUnixMicros(absl::Now()));
  entry.event.set_sequence(++last_sequence_);
  if (keeper_ != nullptr) keeper_->KeepEvent(entry.event, owner);
  if (ring_.size() == capacity_) {
    ring_.pop_front();
  }
  ring_.push_back(std::move(entry));
}

std::vector<v1::Event> EventLog::List(absl::string_view job, int limit,
                                      absl::FunctionRef<bool(const Tenant& owner)> may_see) const {
  const size_t wanted = static_cast<size_t>(limit > 0 ? limit : kDefaultLimit);
  std::vector<v1::Event> events;
  absl::MutexLock lock(&mutex_);
  for (auto it = ring_.rbegin(); it != ring_.rend() && events.size() < wanted; ++it) {
    if ((job.empty() || job == it->event.job()) && may_see(it->owner)) {
      events.push_back(it->event);
    }
  }
  std::reverse(events.begin(), events.end());
  return events;
}

uint64_t EventLog::last_sequence() const {
  absl::MutexLock lock(&mutex_);
  return last_sequence_;
}

}  // namespace shardd
