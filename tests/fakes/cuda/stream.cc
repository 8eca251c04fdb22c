#include "tests/fakes/cuda/stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace shardd::fake_cuda {

uint64_t SharedQueue::Take() {
  std::lock_guard lock(mutex_);
  places_.insert(next_);
  return next_++;
}

bool SharedQueue::IsFirst(uint64_t place) const {
  std::lock_guard lock(mutex_);
  return *places_.begin() == place;
}

void SharedQueue::Leave(uint64_t place) {
  std::lock_guard lock(mutex_);
  places_.erase(place);
}

Stream::Stream(const Options& options) : options_(options), random_(options.delay_seed) {
  thread_ = std::thread([this] { Run(); });
}

Stream::~Stream() {
  Stop();
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const Queued& queued : queue_) {
    if (options_.shared != nullptr) options_.shared->Leave(queued.place);
  }
}

bool Stream::Enqueue(Item item, size_t* length) {
  std::unique_lock lock(mutex_);
  if (capturing_ && !Stopped()) {
    captured_.push_back(std::move(item));
    *length = 0;
    return true;
  }
  changed_.wait(lock, [&] { return Stopped() || queue_.size() < options_.queue_limit; });
  if (Stopped()) return false;
  queue_.push_back({std::move(item), options_.shared == nullptr ? 0 : options_.shared->Take()});
  *length = queue_.size();
  lock.unlock();
  changed_.notify_all();
  return true;
}

bool Stream::BeginCapture() {
  std::lock_guard lock(mutex_);
  return !std::exchange(capturing_, true);
}

bool Stream::EndCapture(std::vector<Item>* items) {
  std::lock_guard lock(mutex_);
  *items = std::exchange(captured_, {});
  return std::exchange(capturing_, false);
}

bool Stream::Capturing() const {
  std::lock_guard lock(mutex_);
  return capturing_;
}

bool Stream::Idle() const {
  std::lock_guard lock(mutex_);
  return queue_.empty();
}

void Stream::WaitUntilIdle() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return Stopped() || queue_.empty(); });
}

void Stream::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void Stream::Hang(bool hang) {
  {
    std::lock_guard lock(mutex_);
    hanging_ = hang;
  }
  changed_.notify_all();
}

void Stream::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || (!Stopped() && !hanging_ && !queue_.empty()); });
    if (ending_) return;
    const Queued& front = queue_.front();  // stays where it is while others are appended
    lock.unlock();
    if (options_.shared != nullptr) PollUntil(*this, [&] { return options_.shared->IsFirst(front.place); });
    if (options_.delay_seed != 0) {
      random_ = random_ * 6364136223846793005u + 1442695040888963407u;
      std::this_thread::sleep_for(std::chrono::microseconds((random_ >> 33) % 200));
    }
    const CUresult result = front.item(*this);
    if (options_.shared != nullptr) options_.shared->Leave(front.place);
    if (result != CUDA_SUCCESS) options_.lose(result);
    lock.lock();
    const Queued dropped = std::move(queue_.front());
    queue_.pop_front();
    changed_.notify_all();
  }
}

void Event::Recorded() {
  std::lock_guard lock(mutex_);
  ++recorded_;
}

void Event::Reached(uint64_t record) {
  std::lock_guard lock(mutex_);
  reached_ = std::max(reached_, record);
}

uint64_t Event::last_record() const {
  std::lock_guard lock(mutex_);
  return recorded_;
}

bool Event::Done(uint64_t record) const {
  std::lock_guard lock(mutex_);
  return reached_ >= record;
}

void PollUntil(const Stream& stream, const std::function<bool()>& satisfied) {
  while (!stream.Stopped() && !satisfied()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace shardd::fake_cuda
