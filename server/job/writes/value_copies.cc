#include "server/job/writes/value_copies.h"

#include <utility>

#include "server/loop/core_loop.h"
#include "server/storage/job_slab.h"
#include "server/turns/turn_queue.h"

namespace shardd {
namespace {

constexpr int64_t kMadeAtOnceBytes = int64_t{64} << 10;

}  // namespace

bool ValueCopies::IsMadeAtOnce(const JobSlab& slab, int64_t size_bytes) const {
  return slab.on_host() && size_bytes <= kMadeAtOnceBytes && under_way_ == 0;
}

void ValueCopies::Run(std::shared_ptr<void> job, Copy copy, Then then) {
  ++under_way_;
  copier_->Post(owner_, [this, job = std::move(job), copy = std::move(copy), then = std::move(then)] {
    progressed_ns_.store(absl::ToUnixNanos(MonotonicNow()), std::memory_order_relaxed);
    bool more = false;
    absl::Status status = copy(&more);
    const bool finished = !more || !status.ok();
    progressed_ns_.store(0, std::memory_order_relaxed);  // before anybody hears that it has ended
    if (finished) {
      loop_->Post([this, job, then, status = std::move(status)] {
        --under_way_;
        then(status);
      });
    }
    return finished;
  });
}

void ValueCopies::Behind(absl::AnyInvocable<void()> closure) {
  copier_->Post(owner_, [closure = std::move(closure)]() mutable {
    closure();
    return true;
  });
}

bool ValueCopies::IsStuck(absl::Time now) const {
  const int64_t progressed_ns = progressed_ns_.load(std::memory_order_relaxed);
  return progressed_ns != 0 && now - absl::FromUnixNanos(progressed_ns) > kLimit;
}

}  // namespace shardd
