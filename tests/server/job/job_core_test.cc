// What happens around a decided step: whatever dies or leaves between the decision and the commit, the step completes
// first. Device work of the optimizer stream is held, so that the moment can be hit.

#include "server/job/job_core.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/local/local_collective.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);

// Keeps what comes on the optimizer stream while it is held.
class HeldDevice final : public Device {
 public:
  explicit HeldDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}
  const std::string& name() const override { return device_->name(); }
  void Submit(StreamId stream, DeviceWork work) override {
    {
      absl::MutexLock lock(&mutex_);
      if (held_ && stream == StreamId::kOptimizer) {
        kept_.push_back(std::move(work));
        return;
      }
    }
    device_->Submit(stream, std::move(work));
  }
  std::vector<StreamStatus> Status() const override { return device_->Status(); }
  void Shutdown() override { device_->Shutdown(); }

  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  // With an error: the work is not done.
  void Release(const absl::Status& status = absl::OkStatus()) {
    std::vector<DeviceWork> kept;
    {
      absl::MutexLock lock(&mutex_);
      held_ = false;
      kept.swap(kept_);
    }
    for (DeviceWork& work : kept) {
      if (status.ok()) {
        device_->Submit(StreamId::kOptimizer, std::move(work));
      } else {
        work.done(status);
      }
    }
  }
  bool Waiting() const {
    absl::MutexLock lock(&mutex_);
    return !kept_.empty();
  }

 private:
  const std::unique_ptr<Device> device_;
  mutable absl::Mutex mutex_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<DeviceWork> kept_ ABSL_GUARDED_BY(mutex_);
};

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

 private:
  mutable absl::Mutex mutex_;
  std::vector<v1::SessionEvent> events_ ABSL_GUARDED_BY(mutex_);
};

class JobCoreTest : public ::testing::Test {
 protected:
  JobCoreTest() {
    SpecBuilder builder(kRanks);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "w", {64});
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
    JobCore::Init init;
    init.id = 1;
    init.uid = getuid();
    init.spec = builder.spec();
    init.plan = plan_;
    const std::string directory = folder_.path() + "/job";
    auto memory = JobMemory::Create(*plan_, "job", folder_.path(), directory);
    auto journal = Journal::Create(folder_.path() + "/journal", plan_->memory.journal_bytes / 2);
    EXPECT_TRUE(memory.ok() && journal.ok()) << memory.status() << journal.status();
    init.memory = *std::move(memory);
    init.journal = *std::move(journal);
    auto devices = *MakeDevices("cpu:2");
    for (auto& device : devices) {
      devices_.push_back(std::make_unique<HeldDevice>(std::move(device)));
      init.devices.push_back(devices_.back().get());
    }
    init.collective = std::make_unique<LocalCollective>(init.devices);
    init.loop = &loop_;
    init.reaper = &reaper_;
    init.events = &events_;
    OnLoop([&] { job_ = std::make_shared<JobCore>(std::move(init)); });
    for (int rank = 0; rank < kRanks; ++rank) {
      Attach(rank);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      v1::Command command;
      command.mutable_commit_parameters();
      Send(rank, command);
    }
    EXPECT_TRUE(Until([&] { return job_->version() == 1; }));
  }
  ~JobCoreTest() override {
    OnLoop([&] { job_->Close("the test has ended"); });
    for (const auto& device : devices_) {
      device->Release();
      device->Shutdown();
    }
    OnLoop([&] { job_.reset(); });
    loop_.Stop();
    reaper_.Stop();
  }

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

  void Attach(int rank) {
    auto session = Session::Create(plan_, ++sessions_made_, rank, epoch());
    ASSERT_TRUE(session.ok()) << session.status();
    streams_[rank] = std::make_shared<Events>();
    OnLoop([&] {
      Session* added = session->get();
      const absl::Status status = job_->AddSession(*std::move(session));
      ASSERT_TRUE(status.ok()) << status;
      job_->SessionLive(added, streams_[rank]);
    });
  }
  void Send(int rank, const v1::Command& command) {
    v1::CommandBatch batch;
    *batch.add_commands() = command;
    OnLoop([&] {
      if (Session* session = job_->session(rank); session != nullptr) {
        job_->ExecuteFromStream(session, batch);
      }
    });
  }
  // Gradients of 1, one backward, and Step.
  void Train(int rank) {
    OnLoop([&] {
      ASSERT_NE(job_->session(rank), nullptr) << "rank " << rank;
      auto* slot = reinterpret_cast<float*>(const_cast<char*>(job_->session(rank)->slot(0)));
      std::fill(slot, slot + 64, 1.0f);
    });
    v1::Command command;
    command.mutable_unshard()->set_phase(v1::PHASE_BACKWARD);
    Send(rank, command);
    command.mutable_submit_gradients()->set_group(0);
    Send(rank, command);
    command.mutable_reshard()->set_group(0);
    Send(rank, command);
    command.mutable_backward_done()->set_last(true);
    Send(rank, command);
    v1::HyperParameters* group = command.mutable_step()->add_groups();
    group->set_lr(0.5);
    command.mutable_step()->set_trainer_state(absl::StrCat("state of rank ", rank));
    Send(rank, command);
  }
  void TrainUntilDecided() {
    for (const auto& device : devices_) {
      device->Hold();
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Train(rank);
    }
    ASSERT_TRUE(testing::PollUntil([&] { return devices_[0]->Waiting() && devices_[1]->Waiting(); }, kPatience));
  }
  void Release(const absl::Status& status = absl::OkStatus()) {
    for (const auto& device : devices_) {
      device->Release(status);
    }
  }
  uint64_t epoch() {
    uint64_t result = 0;
    OnLoop([&] { result = job_->epoch(); });
    return result;
  }
  int64_t committed() {
    int64_t result = 0;
    OnLoop([&] { result = job_->committed_step(); });
    return result;
  }
  float value() { return *job_->memory().shards()->At<float>(0); }

  static constexpr int kRanks = 2;
  testing::TempDir folder_;
  EventLog events_;
  std::shared_ptr<const ShardPlan> plan_;
  std::vector<std::unique_ptr<HeldDevice>> devices_;
  std::shared_ptr<Events> streams_[kRanks];
  uint64_t sessions_made_ = 0;
  CoreLoop reaper_;
  CoreLoop loop_;
  std::shared_ptr<JobCore> job_;
};

TEST_F(JobCoreTest, RankThatDiesAfterTheDecisionChangesNothingOfTheStep) {
  TrainUntilDecided();
  const uint64_t before = epoch();
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });
  EXPECT_EQ(epoch(), before) << "the abort waits";
  EXPECT_EQ(committed(), 0);
  Release();
  ASSERT_TRUE(Until([&] { return job_->epoch() == before + 1; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(value(), -0.5f);
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kCommitted), 1);
  ASSERT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 1);
  EXPECT_EQ(streams_[1]->Aborted().committed_step(), 1) << "commit first, then the abort";
  EXPECT_EQ(streams_[1]->Aborted().trainer_state(), "state of rank 1");
  EXPECT_EQ(streams_[1]->Aborted().lost_ranks_size(), 1);
}

TEST_F(JobCoreTest, BothRanksThatDieAfterTheDecisionAreNamedOnce) {
  TrainUntilDecided();
  OnLoop([&] {
    job_->SessionLost(0, "its process ended");
    job_->SessionLost(0, "its session stream ended");
    job_->SessionLost(1, "its process ended");
  });
  Release();
  ASSERT_TRUE(Until([&] { return job_->attached() == 0; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(streams_[0]->Aborted().lost_ranks_size(), 2);
}

TEST_F(JobCoreTest, RankThatDetachesAfterStepIsLetGoWithTheCommit) {
  TrainUntilDecided();
  const uint64_t before = epoch();
  OnLoop([&] { job_->Detach(0, /*finished=*/true); });
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kDetached), 0);
  OnLoop([&] { job_->SessionLost(0, "its process ended"); });  // it need not wait for the answer
  Release();
  ASSERT_TRUE(Until([&] { return job_->session(0) == nullptr; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_EQ(epoch(), before) << "nobody else is troubled";
}

TEST_F(JobCoreTest, CommandsDuringTheCommitAreAnErrorThatComesAfterIt) {
  TrainUntilDecided();
  v1::Command command;
  command.mutable_submit_gradients()->set_group(0);
  Send(1, command);
  EXPECT_EQ(streams_[1]->Count(v1::SessionEvent::kAborted), 0);
  OnLoop([&] { EXPECT_TRUE(job_->session(1)->broken) << "nothing is read from it any more"; });
  Release();
  ASSERT_TRUE(Until([&] { return job_->attached() == 0; }));
  EXPECT_EQ(committed(), 1);
  EXPECT_NE(streams_[1]->Aborted().message().find("the step is being committed"), std::string::npos);
}

TEST_F(JobCoreTest, RankThatDiesBeforeTheDecisionDropsTheStep) {
  Train(0);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  EXPECT_EQ(committed(), 0);
  EXPECT_EQ(value(), 0.0f);
  Attach(0);
  Attach(1);
  Train(0);
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->committed_step() == 1; }));
  EXPECT_EQ(value(), -0.5f) << "the dropped gradient took no part";
}

TEST_F(JobCoreTest, DeviceThatFailsInAnUpdateEndsTheJobAndSaysSo) {
  TrainUntilDecided();
  Release(absl::CancelledError("the device is shutting down"));
  ASSERT_TRUE(Until([&] { return job_->closed(); }));
  EXPECT_EQ(streams_[0]->Aborted().code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_NE(streams_[0]->Aborted().message().find("the device is shutting down"), std::string::npos);
}

TEST_F(JobCoreTest, ClientIsToldForWhomItWaitsAndWhetherThatRankIsThere) {
  Train(0);
  OnLoop([&] { job_->Detach(1, /*finished=*/false); });  // aborts: everybody attaches anew
  Attach(0);
  Train(0);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Seconds(1)); });
  ASSERT_EQ(streams_[0]->Count(v1::SessionEvent::kWaiting), 1);
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + absl::Seconds(2)); });
  EXPECT_EQ(streams_[0]->Count(v1::SessionEvent::kWaiting), 1) << "told once";
  v1::ListRanksResponse ranks;
  OnLoop([&] { job_->DescribeRanks(&ranks); });
  EXPECT_NE(ranks.ranks(0).waiting_for().find("rank 1: SubmitGradients"), std::string::npos);
  EXPECT_NE(ranks.ranks(0).waiting_for().find("not attached"), std::string::npos);
}

TEST_F(JobCoreTest, ProcessOfASessionIsWatchedOnceItsPidfdCame) {
  testing::Child process([] {
    pause();
    return 0;
  });
  OnLoop([&] {
    job_->WatchProcess(job_->session(0), UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, process.pid(), 0))));
  });
  process.Kill();
  EXPECT_TRUE(Until([&] { return job_->session(0) == nullptr; }));
}

}  // namespace
}  // namespace shardd
