#ifndef SHARDD_TESTS_SERVER_JOB_JOB_CORE_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_JOB_CORE_FIXTURE_H_

// One job of two ranks with its loop and devices, without a port or a second process. Device work of the optimizer
// stream can be held, so that the moment between a decision and its end can be hit.

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
#include "absl/synchronization/notification.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/device/devices.h"
#include "server/job/job_core.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/storage/job_slab.h"
#include "server/storage/journal.h"
#include "server/storage/take_up_log.h"
#include "server/turns/turn_queue.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/common/shm/process_util.h"
#include "tests/server/job/job_loop_fixture.h"

namespace shardd {

// Keeps what comes on one stream, the optimizer's unless another is named, while it is held.
class HeldDevice final : public Device {
 public:
  explicit HeldDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}
  const std::string& name() const override { return device_->name(); }
  void Submit(StreamId stream, DeviceWork work) override {
    {
      absl::MutexLock lock(&mutex_);
      if (held_ && stream == stream_) {
        kept_.push_back(std::move(work));
        return;
      }
    }
    device_->Submit(stream, std::move(work));
  }
  std::vector<StreamStatus> Status() const override { return device_->Status(); }
  void Shutdown() override { device_->Shutdown(); }

  void Hold(StreamId stream = StreamId::kOptimizer) {
    absl::MutexLock lock(&mutex_);
    held_ = true;
    stream_ = stream;
  }
  // With an error: the work is not done.
  void Release(const absl::Status& status = absl::OkStatus()) {
    std::vector<DeviceWork> kept;
    StreamId stream;
    {
      absl::MutexLock lock(&mutex_);
      held_ = false;
      stream = stream_;
      kept.swap(kept_);
    }
    for (DeviceWork& work : kept) {
      if (status.ok()) {
        device_->Submit(stream, std::move(work));
      } else {
        work.done(status);
      }
    }
  }
  bool Waiting() const { return kept() > 0; }
  size_t kept() const {
    absl::MutexLock lock(&mutex_);
    return kept_.size();
  }
  // The first of what is held, to its end; nothing where nothing is.
  void RunFirst() {
    DeviceWork work;
    StreamId stream;
    {
      absl::MutexLock lock(&mutex_);
      if (kept_.empty()) return;
      work = std::move(kept_.front());
      kept_.erase(kept_.begin());
      stream = stream_;
    }
    absl::Notification ended;
    work.done = [done = std::move(work.done), &ended](absl::Status status) {
      done(std::move(status));
      ended.Notify();
    };
    device_->Submit(stream, std::move(work));
    EXPECT_TRUE(ended.WaitForNotificationWithTimeout(kPatience));
  }

 private:
  const std::unique_ptr<Device> device_;
  mutable absl::Mutex mutex_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  StreamId stream_ ABSL_GUARDED_BY(mutex_) = StreamId::kOptimizer;
  std::vector<DeviceWork> kept_ ABSL_GUARDED_BY(mutex_);
};

// Of a slab on the host.
template <typename T>
T* SlabAt(const JobSlab* slab, int64_t offset_bytes) {
  return reinterpret_cast<T*>(slab->At(offset_bytes));
}

class JobCoreTest : public JobLoopTest {
 protected:
  JobCoreTest() : JobCoreTest(SgdJob()) {}
  using MakeCollective = std::function<std::unique_ptr<Collective>(std::vector<Device*>)>;
  // `shared_copier`: another job's too; null: one of its own. `place`: where slabs are, if not on the host; this thread
  // writes and reads them all the same. `collective`: makes another than the configuration asks for. `outlives_daemon`:
  // the job tells a next daemon what it has committed.
  explicit JobCoreTest(const SpecBuilder& builder_in, TurnQueue* shared_copier = nullptr, SlabPlace place = {},
                       const MakeCollective& collective = nullptr, bool outlives_daemon = false)
      : place_(std::move(place)) {
    SpecBuilder builder = builder_in;
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
    JobCore::Init init;
    init.id = 1;
    init.owner = {getuid()};
    init.spec = builder.spec();
    init.plan = plan_;
    auto memory = JobMemory::Create(*plan_, "job", /*reserved_bytes=*/0, place_);
    auto journal = Journal::Create(plan_->memory.journal_bytes / 2);
    EXPECT_TRUE(memory.ok() && journal.ok()) << memory.status() << journal.status();
    init.memory = *std::move(memory);
    init.journal = *std::move(journal);
    if (outlives_daemon) init.take_up_log = *TakeUpLog::Create(TakeUpLog::SizesFor(*plan_));
    auto devices = std::move(MakeDevices("cpu:2")->devices);
    for (auto& device : devices) {
      devices_.push_back(std::make_unique<HeldDevice>(std::move(device)));
      init.devices.by_rank.push_back(devices_.back().get());
    }
    if (collective != nullptr) {
      init.devices.collective = collective(init.devices.by_rank);
    } else if (plan_->config.trainer_sums()) {
      init.devices.collective = std::make_unique<TrainerCollective>(init.devices.by_rank);
    } else {
      init.devices.collective = std::make_unique<LocalCollective>(init.devices.by_rank);
    }
    init.loop = &loop_;
    init.copier = shared_copier != nullptr ? shared_copier : &copier_;
    init.devices.memory_worker = CoreLoop::MakeQueue("job memory");
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
    EXPECT_TRUE(Until([&] { return job_->committed().version() == 1; }));
  }
  static SpecBuilder SgdJob() {
    SpecBuilder builder(kRanks);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "w", {64});
    return builder;
  }
  ~JobCoreTest() override {
    OnLoop([&] { job_->Close("the test has ended"); });
    for (const auto& device : devices_) {
      device->Release();
      device->Shutdown();
    }
    copier_.Stop();
    job_->devices().memory_worker()->RunAndWait([] {});
    OnLoop([&] { job_.reset(); });
    loop_.Stop();
  }

  void Attach(int rank) {
    auto session = Session::Create(plan_, ++sessions_made_, rank, epoch(), place_);
    if (session.ok()) (*session)->peer = {.uid = getuid(), .gid = 0, .pid = getpid()};
    ASSERT_TRUE(session.ok()) << session.status();
    const absl::Status status = AddSession(*std::move(session));
    ASSERT_TRUE(status.ok()) << status;
  }
  // With a stream that is the rank's from here on.
  absl::Status AddSession(std::unique_ptr<Session> session) {
    std::shared_ptr<Events>& stream = streams_[session->rank()];
    stream = std::make_shared<Events>();
    return AddLive(job_.get(), std::move(session), stream);
  }
  void Send(int rank, const v1::Command& command) {
    v1::CommandBatch batch;
    *batch.add_commands() = command;
    OnLoop([&] {
      if (Session* session = job_->sessions()[rank].get(); session != nullptr) {
        job_->commands().ExecuteFromStream(session, batch);
      }
    });
  }
  // The rank's session is of a process, which has this number as far as the daemon knows.
  void SetProcess(int rank, pid_t pid, UniqueFd descriptor) {
    OnLoop([&] {
      Session* const session = job_->sessions()[rank].get();
      session->peer.pid = pid;
      session->pidfd.reset();
      job_->WatchProcess(session, std::move(descriptor));
    });
  }
  // Behind the end of an epoch, before any step.
  void AttachAllAndTrainAStep() {
    for (int rank = 0; rank < kRanks; ++rank) Attach(rank);
    for (int rank = 0; rank < kRanks; ++rank) Train(rank);
    ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  }
  // Gradients of 1, one backward, and Step.
  void Train(int rank) {
    Backward(rank);
    Step(rank);
  }
  void Backward(int rank) {
    OnLoop([&] {
      ASSERT_NE(job_->sessions()[rank].get(), nullptr) << "rank " << rank;
      auto* slot = reinterpret_cast<float*>(const_cast<char*>(job_->sessions()[rank].get()->slot(0)));
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
  }
  void Step(int rank) {
    v1::Command command;
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
    OnLoop([&] { result = job_->committed().epoch(); });
    return result;
  }
  uint64_t version() {
    uint64_t result = 0;
    OnLoop([&] { result = job_->committed().version(); });
    return result;
  }
  uint64_t Word(int rank, TimelineWord DaemonPage::*word) { return WordOf(*job_, rank, word); }
  int64_t committed() {
    int64_t result = 0;
    OnLoop([&] { result = job_->view().committed_step(); });
    return result;
  }
  float value() { return *SlabAt<float>(job_->memory().shards(), 0); }

  static constexpr int kRanks = 2;
  const SlabPlace place_;
  EventLog events_;
  std::shared_ptr<const ShardPlan> plan_;
  std::vector<std::unique_ptr<HeldDevice>> devices_;
  std::shared_ptr<Events> streams_[kRanks];
  uint64_t sessions_made_ = 0;
  TurnQueue copier_{"copier"};
  std::shared_ptr<JobCore> job_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_JOB_CORE_FIXTURE_H_
