// Gradient shards that a process of an epoch that has ended may still write: it is stopped, no more is known of it, and
// it goes on in the middle of the next epoch.

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>

#include "absl/strings/match.h"
#include "server/storage/job_slab.h"
#include "tests/server/job/held_memory.h"
#include "tests/server/job/job_core_fixture.h"
#include "tests/server/job/trainer_process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

struct Place {
  const char* name;
  bool on_device;
};
std::ostream& operator<<(std::ostream& out, const Place& place) { return out << place.name; }

class RenewMemory {  // outlives the job
 protected:
  HeldMemory memory_;
};

class Renew : private RenewMemory, public JobCoreTest, public ::testing::WithParamInterface<Place> {
 protected:
  Renew()
      : JobCoreTest(SgdJob(), /*shared_copier=*/nullptr,
                    GetParam().on_device ? SlabPlace{&memory_, {&memory_}} : SlabPlace()) {}

  // The rank's session is of this process, which is stopped and then lost to the job.
  void StopAndLose(int rank, const TrainerProcess& process) {
    SetProcess(rank, process.pid(), process.Descriptor());
    kill(process.pid(), SIGSTOP);
    OnLoop([&] { job_->SessionLost(rank, "silence"); });
  }
  absl::Status TryAttach(int rank) {
    auto session = Session::Create(plan_, ++sessions_made_, rank, epoch(), place_);
    EXPECT_TRUE(session.ok()) << session.status();
    (*session)->peer.pid = pid_;
    (*session)->peer.uid = getuid();
    return AddSession(*std::move(session));
  }
  // All ranks, each by this process, as often as it takes.
  absl::Status AttachAll() {
    absl::Status last;
    (void)testing::PollUntil(
        [&] {
          int attached = 0;
          for (int rank = 0; rank < kRanks; ++rank) {
            bool there = false;
            OnLoop([&] { there = job_->sessions()[rank].get() != nullptr; });
            if (!there) last = TryAttach(rank);
            attached += there || last.ok() ? 1 : 0;
            if (!last.ok() && !absl::IsAborted(last)) return true;
          }
          OnLoop([&] { attached = job_->sessions().attached(); });
          return attached == kRanks;
        },
        kPatience);
    return last;
  }
  pid_t pid_ = getpid();

  float* Gradients() {
    float* result = nullptr;
    OnLoop([&] { result = SlabAt<float>(job_->memory().gradients(), 0); });
    return result;
  }
  // Where a trainer has them: of the host in a mapping of its own, which outlasts the daemon's.
  float* TrainersGradients() {
    float* result = nullptr;
    OnLoop([&] {
      const JobSlab* const slab = job_->memory().gradients();
      result = !slab->on_host() ? SlabAt<float>(slab, 0)
                                : static_cast<float*>(mmap(nullptr, static_cast<size_t>(slab->size_bytes()),
                                                           PROT_READ | PROT_WRITE, MAP_SHARED, slab->fd(), 0));
    });
    return result;
  }
  v1::Purpose Left() {
    v1::Memory memory;
    OnLoop([&] { job_->memory_account().Describe(&memory); });
    for (const v1::Purpose& purpose : memory.purposes()) {
      if (absl::StrContains(purpose.purpose(), "left to")) return purpose;
    }
    return v1::Purpose();
  }
};

TEST_P(Renew, StoresOfAStoppedProcessReachNoLaterGradient) {
  const TrainerProcess stopped;
  float* const late = TrainersGradients();
  ASSERT_NE(late, MAP_FAILED);
  StopAndLose(1, stopped);
  ASSERT_TRUE(AttachAll().ok());
  for (int rank = 0; rank < kRanks; ++rank) Backward(rank);
  ASSERT_TRUE(Until([&] { return SlabAt<float>(job_->memory().gradients(), 0)[63] == 1; }));
  std::fill(late, late + 64, 100.0f);  // it goes on
  for (int rank = 0; rank < kRanks; ++rank) Step(rank);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(SlabAt<float>(job_->memory().shards(), 0)[0], -0.5f);
}

TEST_P(Renew, WhatIsLeftStaysInStatusUntilItsProcessEnds) {
  TrainerProcess stopped;
  StopAndLose(1, stopped);
  ASSERT_TRUE(AttachAll().ok());
  EXPECT_EQ(Left().purpose(), GetParam().on_device ? "gradients left to processes of ended epochs" : "")
      << "the host's pages were given back";
  EXPECT_EQ(Left().allocated_bytes() > 0, GetParam().on_device);
  stopped.End();
  EXPECT_TRUE(Until([&] {
    job_->CheckSilence(MonotonicNow());
    return true;
  }));
  EXPECT_EQ(Left().purpose(), "");
}

TEST_P(Renew, OneIsLeftPerDeviceAndTheNextIsRefused) {
  TrainerProcess first;
  const TrainerProcess second;
  StopAndLose(1, first);
  ASSERT_TRUE(AttachAll().ok());
  StopAndLose(0, second);
  const absl::Status refused = AttachAll();
  if (!GetParam().on_device) {
    EXPECT_TRUE(refused.ok()) << refused;
    return;
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  for (const pid_t pid : {first.pid(), second.pid()}) {
    EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("pid ", pid)));
  }
  first.End();
  EXPECT_TRUE(AttachAll().ok());
}

TEST_P(Renew, WhoIsReplacedIsKilledAndNothingIsMadeAnew) {
  TrainerProcess stopped;
  float* const before = Gradients();
  StopAndLose(1, stopped);
  absl::Status status;
  OnLoop([&] { status = job_->CheckMayAttach(1, getpid(), /*replace=*/true); });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("pid ", stopped.pid())));
  EXPECT_TRUE(stopped.WasKilled());
  ASSERT_TRUE(AttachAll().ok());
  EXPECT_EQ(Gradients(), before);
}

TEST_P(Renew, ARankThatComesBackByItselfKeepsTheShards) {
  float* const before = Gradients();
  OnLoop([&] { job_->SessionLost(1, "its session stream ended"); });
  ASSERT_TRUE(AttachAll().ok());
  EXPECT_EQ(Gradients(), before);
}

// In another PID namespace, before kernel 6.9: neither pids nor their descriptors tell processes apart.
TEST_P(Renew, IndistinguishableRanksComeBackAsOftenAsTheyAreLost) {
  for (int time = 0; time < 3; ++time) {
    OnLoop([&] {
      job_->sessions()[0].get()->peer.pid = job_->sessions()[1].get()->peer.pid = 0;
      job_->SessionLost(1, "its session stream ended");
    });
    pid_ = 0;
    ASSERT_TRUE(AttachAll().ok()) << time;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, Renew, ::testing::Values(Place{"OfTheHost", false}, Place{"OfADevice", true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd
