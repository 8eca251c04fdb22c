// The daemon dies at each of its writes into what the next one goes by, one after the other: before, within and behind
// every write of journal and take-up log, and at each turn of each block of an update, and in the middle of it
// (tests/deadly). Also those by which it takes a job up, and completes the step of the one before.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/e2e/daemon_death.h"
#include "tests/testing/long_run.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// It dies at each write, or at every nth.
int Stride() { return testing::LongRun("SHARDD_DEADLY_STRIDE", 1); }

// That a daemon has made when it dies at the last write of a walk; the last of them may be its successor's.
constexpr int kSteps = 3;

class Deadly : public DaemonDeath {
 protected:
  // Of every job that a daemon has taken up, in this order.
  std::vector<int64_t> StepsTakenUp() const {
    std::vector<int64_t> steps;
    const std::string log = testing::ReadWholeFile(DaemonLog());
    for (const absl::string_view line : absl::StrSplit(log, '\n')) {
      const std::vector<absl::string_view> parts = absl::StrSplit(line, " is taken up at step ");
      int64_t step = 0;
      if (parts.size() == 2 && absl::SimpleAtoi(parts[1].substr(0, parts[1].find(',')), &step)) steps.push_back(step);
    }
    return steps;
  }
  // Until one has lived through two whole steps.
  void Walk(const Args& what) {
    StartCustodian();
    StartKept();
    const Args args = UntilEnough(what);
    std::vector<Child> ranks = StartRanks(args);
    ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
    KillDaemon();
    int deaths = 0, nth = 1;
    for (int64_t most = 0; most < kSteps; nth += Stride(), ++deaths) {
      ASSERT_NO_FATAL_FAILURE(DieAtWrite(nth));
      ASSERT_FALSE(ranks[0].Ended()) << deaths << " deaths";
      const std::vector<int64_t> steps = StepsTakenUp();
      for (size_t i = 1; i < steps.size(); ++i) most = std::max(most, steps[i] - steps[i - 1]);
    }
    std::printf("%d deaths, up to write %d, at steps up to %d\n", deaths, nth - Stride(),
                static_cast<int>(StepsTakenUp().back()));
    StartKept();
    SayEnough();
    ExpectUndisturbed(args, ranks);
    ExpectNothingLeft();
  }
};

TEST_F(Deadly, AtEachWriteOfAdamWLosesNothing) { Walk(Training(kUntilEnough)); }

// Of the rules (update_rules.cc), with both states.
TEST_F(Deadly, AtEachWriteOfRmspropLosesNothing) {
  Walk(Training(kUntilEnough, "rmsprop").With({{"momentum", "0.9"}, {"lr", "0.01"}}));
}

// With three states.
TEST_F(Deadly, AtEachWriteOfAmsgradLosesNothing) {
  Walk(Training(kUntilEnough, "adamw_amsgrad").With({{"lr", "0.01"}}));
}

// Beside other optimizers; each block of a momentum buffer and of a parameter.
TEST_F(Deadly, AtEachWriteOfMuonLosesNothing) {
  Walk(Training(kUntilEnough).With({{"muon", "1"}, {"lr", "0.01"}, {"param_dtype", "bf16"}}));
}

// Each block of rows, of columns and of a parameter, whose RMS of before is the log's to know.
TEST_F(Deadly, AtEachWriteOfAdafactorLosesNothing) {
  Walk(Training(kUntilEnough).With({{"adafactor", "1"}, {"lr", "0.01"}, {"param_dtype", "bf16"}}));
}

TEST_F(Deadly, AtEachWriteOfAStepInPartsLosesNothing) {
  Walk(Training(kUntilEnough).With({{"parts", "1"}, {"lr", "0.01"}, {"param_dtype", "bf16"}}));
}

TEST_F(Deadly, AtEachWriteOfTheTrainersOptimizerLosesNothing) {
  Walk({{"steps", "300"},
        {"recover", "1"},
        {"trained", "adam"},
        {"model", "pass"},
        {"trainers_write", "1"},
        {"blocks", "1"},
        {"numel", "1013"},
        {"keep_every", "1"},
        {"timeout_ms", "60000"}});
}

TEST_F(Deadly, AtEachWriteOfSnapshotsBehindPassesLosesNothing) {
  Walk({{"steps", "300"},
        {"recover", "1"},
        {"trained", "adam"},
        {"model", "pass"},
        {"trainers_write", "1"},
        {"asks", "1"},
        {"midway", "1"},
        {"blocks", "1"},
        {"numel", "1013"},
        {"keep_every", "1"},
        {"timeout_ms", "60000"}});
}

}  // namespace
}  // namespace shardd::e2e
