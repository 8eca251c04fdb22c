#ifndef SHARDD_SERVER_HISTORY_HISTORY_H_
#define SHARDD_SERVER_HISTORY_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/history/history_files.h"
#include "server/loop/core_loop.h"
#include "server/observe/events.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// What jobs did, in files that outlive jobs and daemon: a line for each event, and one for each step, or for all steps
// of a tenth of a second, at the latest with the job's next event or where somebody asks. Whoever adds never waits for
// a disk: a thread of this writes and reads, and what it cannot keep up with is dropped and counted. Thread-safe.
class History final : public EventKeeper {
 public:
  static constexpr absl::Duration kPerLine = absl::Milliseconds(100);  // of one job's steps
  static constexpr size_t kMostWaitingBytes = 1 << 20;

  // Errors: as HistoryFiles::Open.
  static absl::StatusOr<std::unique_ptr<History>> Open(const std::string& folder, int64_t most_bytes);
  // Flush().
  ~History() override;
  // Writes what waits, but waits for the disk for `limit` at most.
  void Flush(absl::Duration limit = absl::InfiniteDuration());

  void KeepEvent(const v1::Event& event, const Tenant& owner) override ABSL_LOCKS_EXCLUDED(mutex_);
  void KeepStep(absl::string_view job, const Tenant& owner, const v1::HistoryStep& step) override
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `done` on the thread of this, with the newest lines that fit, oldest first. Of a job that had a secret
  // they are for those alone who see all jobs: the digest of a secret means nothing to the next daemon.
  void List(v1::ListHistoryRequest request, uint32_t uid, bool sees_all,
            std::function<void(v1::ListHistoryResponse)> done);

 private:
  using Job = std::pair<std::string, uint32_t>;  // name, owner
  struct Steps {
    v1::HistoryLine line;  // of the steps since
    absl::Time since;      // MonotonicNow
  };
  History(std::string folder, HistoryFiles files);
  void Say(const v1::HistoryLine& line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SaySteps(Steps* steps) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On the thread; the first one steps, too.
  void WriteAll() ABSL_LOCKS_EXCLUDED(mutex_);
  void Write() ABSL_LOCKS_EXCLUDED(mutex_);
  v1::ListHistoryResponse Read(const v1::ListHistoryRequest& request, uint32_t uid, bool sees_all) const;

  const std::string folder_;
  HistoryFiles files_;    // the thread's
  absl::Status written_;  // likewise: how the last lines fared
  absl::Mutex mutex_;
  absl::btree_map<Job, Steps> steps_ ABSL_GUARDED_BY(mutex_);  // that are no line yet
  std::string waiting_ ABSL_GUARDED_BY(mutex_);                // lines
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;                // likewise
  CoreLoop thread_{nullptr, "history", CoreLoop::Urgency::kQueue};
};

}  // namespace shardd

#endif  // SHARDD_SERVER_HISTORY_HISTORY_H_
