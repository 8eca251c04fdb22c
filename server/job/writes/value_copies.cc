#include "server/job/writes/value_copies.h"

#include <utility>

namespace shardd {
namespace {

constexpr int64_t kMadeAtOnceBytes = int64_t{64} << 10;

}  // namespace

bool ValueCopies::IsMadeAtOnce(const JobSlab& slab, int64_t size_bytes) const {
  return slab.on_host() && size_bytes <= kMadeAtOnceBytes && under_way_ == 0;
}

void ValueCopies::Run(std::shared_ptr<void> job, Copy copy, Then then) {
  ++under_way_;
  copier_->Post([this, job = std::move(job), copy = std::move(copy), then = std::move(then)] {
    Progress();
    loop_->Post([this, job, then, status = copy()] {
      --under_way_;
      then(status);
    });
    progressed_ns_.store(0, std::memory_order_relaxed);
  });
}

void ValueCopies::Progress() { progressed_ns_.store(absl::ToUnixNanos(MonotonicNow()), std::memory_order_relaxed); }

bool ValueCopies::IsStuck(absl::Time now) const {
  const int64_t progressed_ns = progressed_ns_.load(std::memory_order_relaxed);
  return progressed_ns != 0 && now - absl::FromUnixNanos(progressed_ns) > kLimit;
}

}  // namespace shardd
