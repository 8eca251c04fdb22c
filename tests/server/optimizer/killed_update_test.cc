// An update whose process is killed, at any moment, and is completed by another one: the bits are those of an
// undisturbed one.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/device.h"
#include "server/job/wait.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr int64_t kNumel = (int64_t{1} << 18) + 777;  // of each of the operations
constexpr int kOps = 3;
constexpr int64_t kStep = 41;
constexpr int kRounds = 60, kMostRounds = 600;
constexpr int kInTheMidst = 5;  // kills, at least
constexpr absl::Duration kPoll = absl::Microseconds(50);

// What outlives the process that updates: parameters, states, gradients and the log.
struct Shared {
  UpdateLog log;
  float p[kOps][kNumel], m[kOps][kNumel], v[kOps][kNumel], g[kOps][kNumel];
  uint16_t cast[kOps][kNumel];
  std::atomic<int> began;
};

class KilledUpdate : public ::testing::TestWithParam<bool> {
 protected:
  KilledUpdate() : shared_(static_cast<Shared*>(Map())), want_(static_cast<Shared*>(Map())) {}
  ~KilledUpdate() override {
    munmap(shared_, sizeof(Shared));
    munmap(want_, sizeof(Shared));
  }
  static void* Map() {
    return mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  static void Fill(Shared* shared) {
    std::memset(static_cast<void*>(shared), 0, sizeof(Shared));
    std::mt19937 random(7);
    for (int op = 0; op < kOps; ++op) {
      for (int64_t i = 0; i < kNumel; ++i) {
        shared->p[op][i] = static_cast<float>(random() % 1000) / 500 - 1;
        shared->g[op][i] = static_cast<float>(random() % 1000) / 500 - 1;
        shared->m[op][i] = static_cast<float>(random() % 1000) / 1000;
        shared->v[op][i] = static_cast<float>(random() % 1000) / 1000;
      }
    }
  }
  std::vector<DeviceOp> Ops(Shared* shared, bool logged) const {
    std::vector<DeviceOp> ops;
    for (int op = 0; op < kOps; ++op) {
      const Logged log{logged ? &shared->log : nullptr, op * kNumel};
      if (GetParam()) {
        ops.emplace_back(AdamWOp{{1e-2, 0.9, 0.999, 1e-8, 0.1, 5, 0.5, false},
                                 shared->p[op],
                                 v1::DTYPE_FLOAT32,
                                 shared->g[op],
                                 shared->m[op],
                                 shared->v[op],
                                 shared->cast[op],
                                 v1::DTYPE_BFLOAT16,
                                 kNumel,
                                 log});
      } else {
        ops.emplace_back(SgdOp{{1e-2, 0.9, 0, 0.1, false, false, 0.5},
                               shared->p[op],
                               v1::DTYPE_FLOAT32,
                               shared->g[op],
                               shared->m[op],
                               shared->cast[op],
                               v1::DTYPE_BFLOAT16,
                               kNumel,
                               log});
      }
    }
    return ops;
  }
  // As a device does: slice by slice.
  static void Run(const std::vector<DeviceOp>& ops) {
    for (const DeviceOp& op : ops) {
      const int64_t slice = CpuOpSlice(op);
      for (int64_t first = 0; first < kNumel; first += slice) {
        RunCpuOp(op, first, std::min(slice, kNumel - first));
      }
    }
  }
  void ExpectSame(const char* what) const {
    EXPECT_EQ(std::memcmp(shared_->p, want_->p, sizeof(Shared::p)), 0) << what;
    EXPECT_EQ(std::memcmp(shared_->m, want_->m, sizeof(Shared::m)), 0) << what;
    EXPECT_EQ(std::memcmp(shared_->v, want_->v, sizeof(Shared::v)), 0) << what;
    EXPECT_EQ(std::memcmp(shared_->cast, want_->cast, sizeof(Shared::cast)), 0) << what;
  }

  Shared* const shared_;
  Shared* const want_;
};

TEST_P(KilledUpdate, IsCompletedWithTheBitsOfAnUndisturbedOne) {
  Fill(want_);
  Run(Ops(want_, /*logged=*/false));
  std::mt19937 random(11);
  int torn = 0, part = 0;
  // On a machine with more to do the update may have ended before this process runs again: then it takes more rounds.
  for (int round = 0; round < kRounds || (part <= kInTheMidst && round < kMostRounds); ++round) {
    Fill(shared_);
    shared_->log.Begin(kStep);
    // Whoever completes it may be killed, too.
    for (int kills = 0; kills < 1 + round % 3; ++kills) {
      shared_->began = 0;
      testing::Child updater([this, first = kills == 0] {
        (void)!nice(19);  // so that whoever kills it is woken in its midst, also where there is one core for both
        shared_->began = 1;
        const std::vector<DeviceOp> ops = Ops(shared_, /*logged=*/true);
        if (first) {
          Run(ops);
        } else {
          for (const DeviceOp& op : ops) EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
        }
        return 0;
      });
      while (shared_->began.load() == 0) absl::SleepFor(kPoll);
      // By what it has done, not by the time: that takes no account of how fast the machine is. Some end by themselves.
      const auto until = static_cast<int64_t>(random() % (kOps * kNumel + kOps * kNumel / 4));
      while (shared_->log.done(kStep) < until && !updater.Ended()) absl::SleepFor(kPoll);
      updater.Kill(SIGKILL);
      updater.Wait();
    }
    part += shared_->log.done(kStep) > 0 && shared_->log.done(kStep) < kOps * kNumel ? 1 : 0;
    torn += shared_->log.is_torn(kStep) ? 1 : 0;
    for (const DeviceOp& op : Ops(shared_, /*logged=*/true)) EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
    ExpectSame("after a kill");
    if (HasFailure()) return;
  }
  EXPECT_GT(part, kInTheMidst) << "kills in the midst of the update";
  RecordProperty("torn_blocks", torn);
}

// At each of its moments: the old values are saved, some of the block is changed, all of it is.
TEST_P(KilledUpdate, ABlockIsPutBackWhereverItWasLeft) {
  Fill(want_);
  Run(Ops(want_, /*logged=*/false));
  for (const int64_t changed : {int64_t{0}, int64_t{1}, int64_t{50}, UpdateLog::kBlockNumel}) {
    Fill(shared_);
    shared_->log.Begin(kStep);
    const std::vector<DeviceOp> ops = Ops(shared_, /*logged=*/true);
    constexpr int64_t kDone = 5 * UpdateLog::kBlockNumel;
    RunCpuOp(ops[0], 0, kDone);
    UpdateLog& log = shared_->log;
    const int64_t bytes = UpdateLog::kBlockNumel * static_cast<int64_t>(sizeof(float));
    log.Save(0, shared_->p[0] + kDone, bytes);
    log.Save(1, shared_->m[0] + kDone, bytes);
    log.Save(2, shared_->v[0] + kDone, bytes);
    log.Begun(kDone, UpdateLog::kBlockNumel);
    EXPECT_TRUE(log.is_torn(kStep));
    std::vector<DeviceOp> unlogged = Ops(shared_, /*logged=*/false);
    if (changed > 0) RunCpuOp(unlogged[0], kDone, changed);
    for (const DeviceOp& op : ops) EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
    ExpectSame("after a torn block");
  }
}

// As a piece ends, or begins where its copy is not aligned.
TEST_P(KilledUpdate, OfAShortBlockNoMoreIsPutBack) {
  Fill(want_);
  Run(Ops(want_, /*logged=*/false));
  Fill(shared_);
  shared_->log.Begin(kStep);
  const std::vector<DeviceOp> ops = Ops(shared_, /*logged=*/true);
  constexpr int64_t kDone = 5 * UpdateLog::kBlockNumel;
  constexpr int64_t kShort = 10;
  RunCpuOp(ops[0], 0, kDone);  // leaves its last block in the log
  UpdateLog& log = shared_->log;
  log.Save(0, shared_->p[0] + kDone, kShort * static_cast<int64_t>(sizeof(float)));
  log.Save(1, shared_->m[0] + kDone, kShort * static_cast<int64_t>(sizeof(float)));
  log.Save(2, shared_->v[0] + kDone, kShort * static_cast<int64_t>(sizeof(float)));
  log.Begun(kDone, kShort);
  RunCpuOp(Ops(shared_, /*logged=*/false)[0], kDone, kShort / 2);
  for (const DeviceOp& op : ops) EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
  ExpectSame("after a torn short block");
}

TEST_P(KilledUpdate, ALogOfAnotherStepSaysThatNothingIsDone) {
  Fill(want_);
  Run(Ops(want_, /*logged=*/false));
  Fill(shared_);
  shared_->log.Begin(kStep - 1);
  shared_->log.Done(kOps * kNumel);
  EXPECT_FALSE(shared_->log.is_of(kStep));
  shared_->log.Begin(kStep);
  for (const DeviceOp& op : Ops(shared_, /*logged=*/true)) EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
  ExpectSame("from the beginning");
}

INSTANTIATE_TEST_SUITE_P(Kinds, KilledUpdate, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AdamW" : "SgdWithMomentum"; });

}  // namespace
}  // namespace shardd
