// The daemon dies while ranks train whose memory lies on GPUs, at any moment and in the middle of what its streams do,
// and its successor goes on with their jobs: no committed step is lost, and what comes of it has the bits of an
// undisturbed run.

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/cuda_death.h"
#include "tests/testing/long_run.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// For each case. A long run: SHARDD_DEATHS=250, and SHARDD_DEATH_SEED.
int Kills() { return testing::LongRun("SHARDD_DEATHS", 12); }

struct Case {
  std::string name;
  int gpus;
  Args args;
  friend void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }
};

class CudaDeathOf : public CudaDeath, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaDeathOf, KillsAtAnyMomentLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  const Args args = UntilEnough(Training(kUntilEnough, GetParam().args));
  StartOnGpus(GetParam().gpus);
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  KillAgainAndAgain(ranks[0], Kills(), /*most_steps_lost=*/0);
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

const Case kCases[] = {
    {"AdamWOnOne", 1, {{"max_norm", "0.1"}}},
    {"SgdOnOne", 1, {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}, {"trainer_sums", "2"}}},
    {"AdamWOverTwo", 2, {{"trainer_sums", "2"}, {"filler", "3000000"}, {"micro", "2"}}},
    {"SgdInBf16OverTwo",
     2,
     {{"optimizer", "sgd"}, {"param_dtype", "bf16"}, {"unshard_mode", "ZERO_COPY"}, {"forward_prefetch", "1"}}},
    {"ThreeRanksInDim0OverTwo", 2, {{"world", "3"}, {"layout", "DIM0"}, {"absent", "mixed"}}},
    {"FourHybridOverTwo", 2, {{"world", "4"}, {"strategy", "HYBRID_SHARD"}, {"group_size", "2"}}},
    {"ByTheStreamOverTwo", 2, {{"model", "stream"}}},
    {"OffloadedOverTwo", 2, {{"offload", "HOST"}, {"filler", "300000"}}},
};
INSTANTIATE_TEST_SUITE_P(Jobs, CudaDeathOf, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// What is offloaded is updated by threads of the host, each with a log of its own, and completed by one. Every daemon
// has another number of them.
TEST_F(CudaDeath, KillsAtAnyMomentLoseNothingOfWhatIsOffloaded) {
  const Args args =
      UntilEnough(Training(kUntilEnough, {{"offload", "HOST"}, {"filler", "3000000"}, {"max_norm", "0.1"}}));
  StartOnGpus(1);
  flags_ = {"--offload_threads=4"};
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 2; }));
  std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 31)));
  for (int kills = 0; kills < Kills(); ++kills) {
    absl::SleepFor(absl::Microseconds(1000 + random() % 60000));
    const int64_t committed = Committed();
    KillDaemon();
    flags_ = {absl::StrCat("--offload_threads=", 2 * (1 + kills % 4))};
    StartKept();
    if (HasFatalFailure()) return;
    EXPECT_GE(Committed(), committed) << "kill " << kills;
  }
  EXPECT_FALSE(ranks[0].Ended());
  SayEnough();
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

// Passes read copies there, of shards into which ranks may store at any time.
const Case kEditing[] = {
    {"OnOne", 1, {}}, {"InBf16OverTwo", 2, {{"param_dtype", "bf16"}}}, {"OffloadedOverTwo", 2, {{"offload", "HOST"}}}};

class CudaDeathOfEdits : public CudaDeath, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaDeathOfEdits, KillsAtAnyMomentLoseNothing) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  StartOnGpus(GetParam().gpus);
  KillWhereRanksTrain(Training(kUntilEnough, kEdits.With(GetParam().args)), Kills());
}

INSTANTIATE_TEST_SUITE_P(Jobs, CudaDeathOfEdits, ::testing::ValuesIn(kEditing),
                         [](const auto& info) { return info.param.name; });

constexpr int kKeepEvery = 3;
const Args kPass = {{"model", "pass"},
                    {"trainers_write", "1"},
                    {"blocks", "3"},
                    {"numel", "60013"},
                    {"keep_every", absl::StrCat(kKeepEvery)}};
const Args kPassOfAdam = kPass.With({{"trained", "adam"}, {"ordered", "0"}});

// Optimizers run in the ranks, which look at the values by themselves: an abort goes back to the snapshot.
class CudaDeathOfPasses : public CudaDeath, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaDeathOfPasses, KillsWhereRanksUpdateGoBackToTheSnapshot) {
  SHARDD_NEEDS_GPUS(GetParam().gpus);
  const Args args = UntilEnough(Training(kUntilEnough, GetParam().args));
  StartOnGpus(GetParam().gpus);
  StartKept();
  std::vector<Child> ranks = StartRanks(args);
  KillAgainAndAgain(ranks[0], Kills(), /*most_steps_lost=*/kKeepEvery);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  ExpectAllOk(Reports(args));
  ExpectNothingLeft();
}

const Case kPasses[] = {{"AdamByTheHost", 1, kPassOfAdam},
                        {"SgdByTheStreamOverTwo", 2, kPass.With({{"trained", "sgd"}, {"ordered", "1"}})}};
INSTANTIATE_TEST_SUITE_P(Jobs, CudaDeathOfPasses, ::testing::ValuesIn(kPasses),
                         [](const auto& info) { return info.param.name; });

// Where the fake driver's process dies by itself: in the nth of its kernels, copies or words, halfway.
struct DeathIn {
  const char* name;
  std::string what;
  std::vector<int> nth;
  int gpus;
  Args args;
  friend void PrintTo(const DeathIn& value, std::ostream* out) { *out << value.name; }
};

class CudaDeathIn : public CudaDeath, public ::testing::WithParamInterface<DeathIn> {};

TEST_P(CudaDeathIn, ACallOfItsStreamsLosesNothing) {
  SHARDD_NEEDS_FAKE_GPUS("a process dies in the nth of its calls");
  const Args args = Training(40, GetParam().args);
  StartOnGpus(GetParam().gpus);
  StartKept();  // whose address ranks are told
  KillDaemon();
  std::unique_ptr<testing::DaemonProcess> dying = StartDying(GetParam().what, GetParam().nth.front());
  std::vector<Child> ranks = StartRanks(args);
  for (size_t i = 1; i <= GetParam().nth.size(); ++i) {
    ASSERT_EQ(dying->process().Wait(), 1000 + SIGKILL) << "death " << i;
    dying = i < GetParam().nth.size() ? StartDying(GetParam().what, GetParam().nth[i]) : nullptr;
  }
  StartKept();
  ExpectUndisturbed(args, ranks);
  ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(
    Calls, CudaDeathIn,
    ::testing::Values(DeathIn{"AKernel", "shardd_adamw", {5, 2, 9, 3, 14, 30, 31}, 1, {}},
                      DeathIn{"AKernelOfSgd",
                              "shardd_sgd",
                              {4, 2, 12, 7},
                              2,
                              {{"optimizer", "sgd"}, {"momentum", "0.9"}, {"lr", "0.02"}}},
                      DeathIn{"AWord", "cuStreamWriteValue64", {3, 5, 1, 8, 22, 2, 41, 60}, 1, {}},
                      DeathIn{"AWordOverTwo", "cuStreamWriteValue64", {7, 2, 31, 12}, 2, {}},
                      DeathIn{"ACopy", "cuMemcpyAsync", {40, 9, 3, 70, 33, 120, 4}, 1, {}},
                      DeathIn{"ACopyOverTwo", "cuMemcpyAsync", {60, 11, 5, 90, 150}, 2, {}},
                      DeathIn{"ACopyOfAPass", "cuMemcpyAsync", {30, 9, 50, 21}, 2, kPassOfAdam},
                      DeathIn{"AnUpdateOfWhatRanksEdit", "shardd_adamw", {5, 2, 9, 3, 14, 6}, 1, kEdits},
                      DeathIn{"ACopyOfWhatRanksEdit", "cuMemcpyAsync", {40, 9, 23, 70, 33, 51, 18}, 2, kEdits}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardd::e2e
