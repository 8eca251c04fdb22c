#include "server/daemon/take_up/take_ups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"

namespace shardd {
namespace {

constexpr size_t kMostThreads = 64;  // a user's jobs that take minutes are not to keep those of others waiting

constexpr absl::Duration kAgainAfter = absl::Seconds(1);  // where something was short

absl::Status ComeAgain(absl::string_view what, absl::string_view which, absl::string_view lacks) {
  return absl::AbortedError(absl::StrCat(
      what, ": ", which, " being taken up: ",
      lacks.empty() ? "an update that the daemon before has left is completed, and ranks wait for that" : lacks,
      "; try again"));
}

}  // namespace

void TakeUps::Begin(std::map<Name, std::vector<TakeUp>> jobs, absl::Duration limit) {
  const size_t threads = std::min(jobs.size(), kMostThreads);
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [name, of_name] : jobs) {
      Left& left = left_[name];
      Queued queued{name, {}};
      for (TakeUp& job : of_name) {
        left.ids.push_back(job.job_id);
        queued.jobs.push_back(std::move(job));
      }
      unknown_.push_back(std::move(queued));
    }
  }
  for (size_t i = 0; i < threads; ++i) {
    threads_.push_back(CoreLoop::MakeQueue("take up"));
    threads_.back()->Post([this] { Work(); });
  }
  absl::MutexLock lock(&mutex_);
  const auto none_left = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return left_.empty(); };
  (void)changed_.Await(&mutex_, none_left, Deadline::In(limit));
}

std::optional<TakeUps::Queued> TakeUps::TakeNext() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    if (!unknown_.empty()) {
      Queued next = std::move(unknown_.front());
      unknown_.pop_front();
      return next;
    }
    // Whatever is under way goes on with the thread that it has.
    if (queued_.empty()) return std::nullopt;
    const auto first = std::min_element(queued_.begin(), queued_.end(),
                                        [](const Queued& a, const Queued& b) { return a.from < b.from; });
    const absl::Duration wait = first->from - MonotonicNow();
    if (wait <= absl::ZeroDuration()) {
      Queued next = std::move(*first);
      queued_.erase(first);
      return next;
    }
    const auto stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopped_; };
    (void)changed_.Await(&mutex_, stopped, Deadline::In(wait));
  }
}

void TakeUps::Work() {
  while (std::optional<Queued> next = TakeNext()) {
    while (!next->jobs.empty()) {
      const absl::StatusOr<Next> then = next->jobs.front().advance();
      absl::MutexLock lock(&mutex_);
      if (stopped_) return;  // what is left is the next daemon's
      left_[next->name].lacks = std::string(then.status().message());
      if (then.ok() && *then == Next::kDone) {
        next->jobs.pop_front();
        continue;
      }
      next->from = then.ok() ? absl::InfinitePast() : MonotonicNow() + kAgainAfter;
      queued_.push_back(*std::move(next));
      next.reset();
      break;
    }
    if (!next.has_value()) continue;
    absl::MutexLock lock(&mutex_);
    left_.erase(next->name);
    changed_.NotifyAll();
  }
}

void TakeUps::Describe(Tenant owner, v1::Job job, Claim claim) {
  absl::MutexLock lock(&mutex_);
  if (const auto it = left_.find({owner.uid, job.name()}); it != left_.end()) {
    it->second.described = {owner, std::move(job), claim};
  }
}

void TakeUps::List(absl::FunctionRef<void(const Tenant& owner, const v1::Job& job, const Claim& claim)> say) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, left] : left_) {
    if (const auto& is = left.described; is.has_value()) say(is->owner, is->job, is->claim);
  }
}

absl::Status TakeUps::CheckDescribed(absl::string_view what, std::optional<uint32_t> uid) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, left] : left_) {
    if (left.described.has_value() || uid.value_or(name.first) != name.first) continue;
    return ComeAgain(what, absl::StrCat("a job of uid ", name.first, " is"), left.lacks);
  }
  return absl::OkStatus();
}

absl::Status TakeUps::Check(absl::string_view what, std::optional<uint32_t> uid, absl::string_view name) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [named, left] : left_) {
    if (named.second == name && uid.value_or(named.first) == named.first) return ComeAgain(what, "it is", left.lacks);
  }
  return absl::OkStatus();
}

absl::Status TakeUps::CheckId(absl::string_view what, uint64_t job_id) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, left] : left_) {
    if (std::count(left.ids.begin(), left.ids.end(), job_id) > 0) return ComeAgain(what, "it is", left.lacks);
  }
  return absl::OkStatus();
}

absl::Status TakeUps::CheckClaims(absl::string_view what) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, left] : left_) {
    if (!left.described.has_value() && left.lacks.empty()) {
      return ComeAgain(what, absl::StrCat(left_.size(), " job(s) of this node are"), "");
    }
  }
  return absl::OkStatus();
}

size_t TakeUps::count() const {
  absl::MutexLock lock(&mutex_);
  return left_.size();
}

std::string TakeUps::Warning() const {
  absl::MutexLock lock(&mutex_);
  if (left_.empty()) return "";
  std::string lacks;
  for (const auto& [name, left] : left_) {
    if (lacks.empty()) lacks = left.lacks;
  }
  return absl::StrCat(left_.size(),
                      " job(s) of the daemon before are being taken up: updates that it left are completed, and the ",
                      "jobs' ranks wait", lacks.empty() ? "" : absl::StrCat("; not yet: ", lacks));
}

bool TakeUps::Stop(absl::Duration limit) {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    changed_.NotifyAll();
    unknown_.clear();
    queued_.clear();
  }
  const absl::Time deadline = MonotonicNow() + limit;
  std::erase_if(threads_, [&](const std::unique_ptr<CoreLoop>& thread) {
    return thread->Stop(std::max(absl::ZeroDuration(), deadline - MonotonicNow()));
  });
  return threads_.empty();
}

}  // namespace shardd
