#include "server/daemon/take_up/take_ups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd {
namespace {

constexpr size_t kMostThreads = 64;  // a user's jobs that take minutes are not to keep those of others waiting

absl::Status ComeAgain(absl::string_view what, absl::string_view which) {
  return absl::AbortedError(absl::StrCat(what, ": ", which,
                                         " being taken up: an update that the daemon before has left ",
                                         "is completed, and ranks wait for that; try again"));
}

}  // namespace

void TakeUps::Begin(std::map<Name, std::vector<TakeUp>> jobs, absl::Duration limit) {
  const size_t threads = std::min(jobs.size(), kMostThreads);
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [name, of_name] : jobs) {
      left_[name];
      queued_.emplace_back(name, std::move(of_name));
    }
  }
  for (size_t i = 0; i < threads; ++i) {
    threads_.push_back(CoreLoop::MakeQueue("take up"));
    threads_.back()->Post([this] { Work(); });
  }
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&TakeUps::AreDescribed, &left_));
  mutex_.AwaitWithTimeout(absl::Condition(
                              +[](Left* left) { return left->empty(); }, &left_),
                          limit);
}

bool TakeUps::AreDescribed(Left* left) {
  return std::all_of(left->begin(), left->end(), [](const auto& entry) { return entry.second.has_value(); });
}

void TakeUps::Work() {
  for (;;) {
    std::pair<Name, std::vector<TakeUp>> next;
    {
      absl::MutexLock lock(&mutex_);
      if (queued_.empty()) return;
      next = std::move(queued_.front());
      queued_.pop_front();
    }
    for (TakeUp& take_up : next.second) {
      {
        absl::MutexLock lock(&mutex_);
        if (stopped_) return;
      }
      std::move(take_up)();
    }
    absl::MutexLock lock(&mutex_);
    left_.erase(next.first);
  }
}

void TakeUps::Describe(Tenant owner, v1::Job job) {
  absl::MutexLock lock(&mutex_);
  if (const auto it = left_.find({owner.uid, job.name()}); it != left_.end()) it->second = {owner, std::move(job)};
}

void TakeUps::List(absl::FunctionRef<void(const Tenant& owner, const v1::Job& job)> say) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, described] : left_) {
    if (described.has_value()) say(described->first, described->second);
  }
}

absl::Status TakeUps::Check(absl::string_view what, std::optional<uint32_t> uid, absl::string_view name) const {
  absl::MutexLock lock(&mutex_);
  const bool is_left = std::any_of(left_.begin(), left_.end(), [&](const auto& entry) {
    return entry.first.second == name && uid.value_or(entry.first.first) == entry.first.first;
  });
  return is_left ? ComeAgain(what, "it is") : absl::OkStatus();
}

absl::Status TakeUps::CheckId(absl::string_view what, uint64_t job_id) const {
  absl::MutexLock lock(&mutex_);
  const bool is_left = std::any_of(left_.begin(), left_.end(), [&](const auto& entry) {
    return entry.second.has_value() && entry.second->second.job_id() == job_id;
  });
  return is_left ? ComeAgain(what, "it is") : absl::OkStatus();
}

absl::Status TakeUps::CheckAny(absl::string_view what) const {
  const size_t left = count();
  return left > 0 ? ComeAgain(what, absl::StrCat(left, " job(s) of this node are")) : absl::OkStatus();
}

size_t TakeUps::count() const {
  absl::MutexLock lock(&mutex_);
  return left_.size();
}

bool TakeUps::Stop(absl::Duration limit) {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    queued_.clear();
  }
  const absl::Time deadline = absl::Now() + limit;
  std::erase_if(threads_, [&](const std::unique_ptr<CoreLoop>& thread) {
    return thread->Stop(std::max(absl::ZeroDuration(), deadline - absl::Now()));
  });
  return threads_.empty();
}

}  // namespace shardd
