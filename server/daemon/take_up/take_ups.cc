#include "server/daemon/take_up/take_ups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd {
namespace {

constexpr size_t kMostThreads = 32;  // a user's jobs that take minutes are not to keep those of others waiting

}  // namespace

void TakeUps::Begin(std::map<Name, std::vector<TakeUp>> jobs, absl::Duration limit) {
  const size_t threads = std::min(jobs.size(), kMostThreads);
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [name, of_name] : jobs) {
      waiting_[name];
      queued_.emplace_back(name, std::move(of_name));
    }
  }
  for (size_t i = 0; i < threads; ++i) {
    threads_.push_back(CoreLoop::MakeQueue("take up"));
    threads_.back()->Post([this] { Work(); });
  }
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&TakeUps::AreDescribed, &waiting_));
  mutex_.AwaitWithTimeout(absl::Condition(
                              +[](std::map<Name, Waiting>* waiting) { return waiting->empty(); }, &waiting_),
                          limit);
}

bool TakeUps::AreDescribed(std::map<Name, Waiting>* waiting) {
  return std::all_of(waiting->begin(), waiting->end(),
                     [](const auto& entry) { return entry.second.described.has_value(); });
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
    for (TakeUp& take_up : next.second) std::move(take_up)();
    std::vector<absl::AnyInvocable<void()>> then;
    {
      absl::MutexLock lock(&mutex_);
      const auto it = waiting_.find(next.first);
      if (it == waiting_.end()) return;  // Stop
      then = std::move(it->second.then);
      waiting_.erase(it);
    }
    for (absl::AnyInvocable<void()>& call : then) std::move(call)();
  }
}

void TakeUps::WhenTakenUp(const Name& name, absl::AnyInvocable<void()> then) {
  {
    absl::MutexLock lock(&mutex_);
    if (const auto it = waiting_.find(name); it != waiting_.end()) {
      it->second.then.push_back(std::move(then));
      return;
    }
  }
  std::move(then)();
}

void TakeUps::Describe(Tenant owner, v1::Job job) {
  absl::MutexLock lock(&mutex_);
  if (const auto it = waiting_.find({owner.uid, job.name()}); it != waiting_.end()) {
    it->second.described = {owner, std::move(job)};
  }
}

void TakeUps::List(absl::FunctionRef<void(const Tenant& owner, const v1::Job& job)> say) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, waiting] : waiting_) {
    if (waiting.described.has_value()) say(waiting.described->first, waiting.described->second);
  }
}

absl::Status TakeUps::Check(absl::string_view what, const Name& name) const {
  absl::MutexLock lock(&mutex_);
  if (!waiting_.contains(name)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": it is being taken up: an update that the daemon before has left ",
                                             "is completed, and its ranks wait for that; try again"));
}

size_t TakeUps::count() const {
  absl::MutexLock lock(&mutex_);
  return waiting_.size();
}

bool TakeUps::Stop(absl::Duration limit) {
  std::map<Name, Waiting> dropped;
  {
    absl::MutexLock lock(&mutex_);
    queued_.clear();
    dropped = std::exchange(waiting_, {});
  }
  dropped.clear();
  const absl::Time deadline = absl::Now() + limit;
  bool ended = true;
  for (std::unique_ptr<CoreLoop>& thread : threads_) {
    if (thread->Stop(std::max(absl::ZeroDuration(), deadline - absl::Now()))) continue;
    ended = false;
    (void)thread.release();  // it may not be destroyed before its thread has ended
  }
  threads_.clear();
  return ended;
}

}  // namespace shardd
