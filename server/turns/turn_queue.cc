#include "server/turns/turn_queue.h"

#include <pthread.h>
#include <time.h>

#include <utility>

namespace shardd {
namespace {

int64_t NowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

TurnQueue::TurnQueue(std::string name) : name_(std::move(name)) {
  thread_ = std::thread([this] { Run(); });
}

TurnQueue::~TurnQueue() { Stop(); }

void TurnQueue::Post(WorkOwner owner, Work work) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  turns_.Enter(owner);
  posted_[owner].push_back(std::move(work));
}

void TurnQueue::Drain() {
  absl::MutexLock lock(&mutex_);
  const auto drained = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return posted_.empty(); };
  mutex_.Await(absl::Condition(&drained));
}

bool TurnQueue::Stop(absl::Duration limit) {
  bool ended = false;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    ended = mutex_.AwaitWithTimeout(absl::Condition(&ended_), limit);
  }
  if (!thread_.joinable()) return ended;
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
  return ended;
}

void TurnQueue::Run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  const auto everybody = [](WorkOwner) { return true; };
  const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !posted_.empty(); };
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(&due));
    const std::optional<WorkOwner> owner = turns_.Next(everybody);
    if (!owner.has_value()) break;  // stopping, and all work is done
    Work& work = posted_[*owner].front();
    mutex_.Unlock();
    const int64_t begin_ns = NowNs();
    const bool finished = work();
    if (finished) work = nullptr;  // what it holds is released here, not under the mutex
    const int64_t took_ns = NowNs() - begin_ns;
    mutex_.Lock();
    turns_.Charge(*owner, took_ns);
    if (!finished) continue;
    std::deque<Work>& rest = posted_[*owner];
    rest.pop_front();
    if (!rest.empty()) continue;
    posted_.erase(*owner);
    turns_.Leave(*owner);
  }
  ended_ = true;
}

}  // namespace shardd
