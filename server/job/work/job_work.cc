#include "server/job/work/job_work.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/loop/core_loop.h"

namespace shardd {

JobWork::Done JobWork::Join(int count, Done on_loop) {
  struct State {
    std::atomic<int> left;
    absl::Mutex mutex;
    absl::Status first;
    Done on_loop;
  };
  auto state = std::make_shared<State>();
  state->left = count;
  state->on_loop = std::move(on_loop);
  return [this, state, job = Keep()](absl::Status status) {
    if (!status.ok()) {
      absl::MutexLock lock(&state->mutex);
      if (state->first.ok()) {
        state->first = std::move(status);
      }
    }
    if (state->left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      loop_->Post([this, state, job] {
        absl::Status first;
        {
          absl::MutexLock lock(&state->mutex);
          first = state->first;
        }
        state->on_loop(std::move(first));
        state->on_loop = nullptr;
        job_->Advance();
      });
    }
  };
}

absl::Status JobWork::CheckMayBegin(const std::string& what) {
  return gradient_work_ == 0 ? absl::OkStatus()
                             : absl::AbortedError(absl::StrCat(
                                   what, "work on gradients of the epoch that ended is still under way; attach again"));
}

JobWork::Done JobWork::JoinGradientWork(int count, Done on_loop) {
  BeginGradientWork();
  return Join(count, [this, on_loop = std::move(on_loop)](absl::Status status) {
    EndGradientWork();
    on_loop(std::move(status));
  });
}

}  // namespace shardd
