#ifndef SHARDD_TESTS_SERVER_JOB_JOB_LOOP_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_JOB_LOOP_FIXTURE_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/job/job_core.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "tests/testing/poll.h"

namespace shardd {

constexpr absl::Duration kPatience = absl::Seconds(10);

class Events final : public SessionStream {
 public:
  void Send(v1::SessionEvent event) override {
    absl::MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
  }
  void Finish(absl::Status) override {}
  int Count(v1::SessionEvent::KindCase kind) const {
    absl::MutexLock lock(&mutex_);
    int count = 0;
    for (const v1::SessionEvent& event : events_) {
      count += event.kind_case() == kind ? 1 : 0;
    }
    return count;
  }
  v1::SessionEvent::Aborted Aborted() const {
    absl::MutexLock lock(&mutex_);
    return events_.empty() ? v1::SessionEvent::Aborted() : events_.back().aborted();
  }
  v1::SessionEvent::Committed Committed() const {  // the last
    absl::MutexLock lock(&mutex_);
    v1::SessionEvent::Committed committed;
    for (const v1::SessionEvent& event : events_) committed = event.has_committed() ? event.committed() : committed;
    return committed;
  }
  v1::SessionEvent::FullParams FullParams() const {
    absl::MutexLock lock(&mutex_);
    return events_.empty() ? v1::SessionEvent::FullParams() : events_.back().full_params();
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<v1::SessionEvent> events_ ABSL_GUARDED_BY(mutex_);
};

// The loop of jobs, which outlives what a test has beside it.
class JobLoopTest : public ::testing::Test {
 protected:
  void OnLoop(const std::function<void()>& body) {
    loop_.RunAndWait([&] { body(); });
  }
  bool Until(const std::function<bool()>& condition) {
    return testing::PollUntil(
        [&] {
          bool result = false;
          OnLoop([&] { result = condition(); });
          return result;
        },
        kPatience);
  }
  // Adds a session, which is live where that is OK.
  absl::Status AddLive(JobCore* job, std::unique_ptr<Session> session, std::shared_ptr<Events> stream) {
    absl::Status status;
    OnLoop([&] {
      Session* const added = session.get();
      status = job->AddSession(std::move(session));
      if (status.ok()) job->SessionLive(added, std::move(stream));
    });
    return status;
  }
  // What a rank's page says, without its epoch; 0 where the rank has no session. On the loop or not.
  uint64_t WordOf(const JobCore& job, int rank, TimelineWord DaemonPage::*word) {
    uint64_t result = 0;
    const auto read = [&] {
      if (const Session* const session = job.sessions()[rank].get(); session != nullptr) {
        result = TimelineSequence((session->memory()->daemon_page->At<DaemonPage>(0)->*word).load());
      }
    };
    loop_.InLoop() ? read() : OnLoop(read);
    return result;
  }

  CoreLoop loop_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_JOB_LOOP_FIXTURE_H_
