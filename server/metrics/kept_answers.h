#ifndef SHARDD_SERVER_METRICS_KEPT_ANSWERS_H_
#define SHARDD_SERVER_METRICS_KEPT_ANSWERS_H_

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardd {

// Answers by question, each of which is asked once a second at most, however many want it: several open pages cost the
// daemon what one does. A question that takes long is asked less often, so that it keeps nobody busy for more than a
// twentieth of the time. Errors are kept as answers are. Bounded: questions that nobody asks any more are forgotten.
// Thread-safe.
template <typename Answer>
class KeptAnswers {
 public:
  using Shared = std::shared_ptr<const Answer>;
  using Clock = std::function<absl::Time()>;
  // `before`: the answer before, of this question; null: there is none.
  using Ask = std::function<absl::StatusOr<Answer>(const Answer* before)>;

  static constexpr absl::Duration kFresh = absl::Seconds(1);
  static constexpr absl::Duration kForgotten = absl::Seconds(30);
  static constexpr absl::Duration kErrorKept = absl::Seconds(5);
  static constexpr int kTimesItsCost = 20;
  static constexpr size_t kMostQuestions = 256;

  explicit KeptAnswers(Clock clock) : clock_(std::move(clock)) {}

  // The answer, of now or of before. Blocks while `ask` does, which runs without the lock: in the first of those that
  // want it anew, while the others get the answer before, or wait if there is none. RESOURCE_EXHAUSTED: there are too
  // many questions.
  absl::StatusOr<Shared> Get(const std::string& question, const Ask& ask) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Kept> kept;
    Shared before;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Time now = clock_();
      Forget(now);
      if (kept_.size() >= kMostQuestions && kept_.find(question) == kept_.end()) {
        return absl::ResourceExhaustedError(
            absl::StrCat("show: too many pages show different jobs (want at most ", kMostQuestions, "); try again"));
      }
      std::shared_ptr<Kept>& found = kept_[question];
      if (found == nullptr) found = std::make_shared<Kept>();
      kept = found;
      kept->wanted = now;
      while (kept->is_asking && !kept->has_answer) changed_.Wait(&mutex_);
      if (kept->is_asking || (kept->has_answer && clock_() < kept->stale_from)) return kept->answer;
      kept->is_asking = true;
      before = kept->has_answer && kept->answer.ok() ? *kept->answer : nullptr;
    }
    const absl::Time began = clock_();
    absl::StatusOr<Answer> answer = ask(before.get());
    absl::MutexLock lock(&mutex_);
    const absl::Duration took = clock_() - began;
    kept->answer = answer.ok() ? absl::StatusOr<Shared>(std::make_shared<const Answer>(*std::move(answer)))
                               : absl::StatusOr<Shared>(answer.status());
    // An error is soon over, and somebody looks just then.
    kept->stale_from =
        began + std::max(kFresh, std::min(kTimesItsCost * took, kept->answer.ok() ? kForgotten : kErrorKept));
    kept->has_answer = true;
    kept->is_asking = false;
    changed_.SignalAll();
    return kept->answer;
  }

 private:
  struct Kept {
    absl::StatusOr<Shared> answer;
    absl::Time stale_from;
    absl::Time wanted;
    bool has_answer = false;
    bool is_asking = false;
  };

  void Forget(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto it = kept_.begin(); it != kept_.end();) {
      const Kept& kept = *it->second;
      const bool is_old = now > kept.wanted + kForgotten && now > kept.stale_from;
      it = is_old && !kept.is_asking ? kept_.erase(it) : std::next(it);
    }
  }

  const Clock clock_;
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::map<std::string, std::shared_ptr<Kept>> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_KEPT_ANSWERS_H_
