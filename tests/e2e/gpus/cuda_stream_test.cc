// Jobs on GPUs whose order is by the trainers' streams (shardd_set_cuda_stream): trainers that never wait for their GPU
// (stream_trainer.h), the daemon and each of them with the fake driver of its own, every operation of every stream late
// by a seed; or on real GPUs.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/gpu_cluster.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

const Args kStream = {{"model", "stream"}, {"device_memory", "1"}};

class ByStream : public GpuCluster {
 protected:
  void SetUp() override { SHARDD_NEEDS_GPUS(1); }
  static double Looked(const TrainerReport& report) {
    const std::string note = report.Note("looked ");
    return note.empty() ? 1 : std::atof(note.c_str() + 7);
  }
};

TEST_F(ByStream, TrainersThatNeverSynchroniseTrainAsTheUnshardedRun) {
  StartOnGpus(1);
  const Args args = kStream.With({{"micro", "2"}, {"lr", "0.003"}});
  std::vector<v1::Rank> ranks;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { ranks = Ranks(); });
  ExpectParity(args, reports);
  ASSERT_EQ(ranks.size(), 2u);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(reports[static_cast<size_t>(rank)].Note("ordered"), "ordered 1");
    EXPECT_TRUE(ranks[static_cast<size_t>(rank)].stream_ordered());
  }
}

TEST_F(ByStream, WhatIsEnqueuedBehindAnAwaitedStepSeesItsVersion) {
  StartOnGpus(1);
  const Args args = kStream.With({{"peek", "1"}, {"steps", "20"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.Note("peeked"), "peeked 19 0");
}

TEST_F(ByStream, TheLegacyDefaultStreamIsAStreamLikeAnyOther) {
  StartOnGpus(2);
  const Args args = kStream.With({{"legacy", "1"}, {"steps", "20"}, {"unshard_mode", "POOLED"}});
  std::vector<v1::Rank> ranks;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { ranks = Ranks(); });
  ExpectParity(args, reports);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(reports[0].Note("ordered"), "ordered 1");
  EXPECT_TRUE(ranks[0].stream_ordered());
}

// Pool slots go from group to group while kernels that read the last one are still to run.
TEST_F(ByStream, PooledGroupsOnTwoStreamsTrainAsTheUnshardedRun) {
  StartOnGpus(2);
  const Args args = kStream.With({{"unshard_mode", "POOLED"},
                                  {"forward_prefetch", "1"},
                                  {"param_dtype", "bf16"},
                                  {"optimizer", "sgd"},
                                  {"streams", "2"}});
  ExpectParity(args, RunRanks(args));
}

TEST_F(ByStream, BehindWaitGradientsAStreamSeesTheStepsSum) {
  StartOnGpus(1);
  const Args args = kStream.With({{"max_norm", "0.1"}, {"look", "1"}, {"steps", "20"}, {"micro", "2"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  for (const TrainerReport& report : reports) EXPECT_LT(Looked(report), 1e-5);
}

TEST_F(ByStream, WithoutMemoryOperationsTheLibraryWaitsAndSaysSo) {
  SHARDD_NEEDS_FAKE_GPUS("a GPU without them");
  StartOnGpus(1, {"FAKE_CUDA_MEMOPS=0"});
  const Args args = kStream.With({{"unshard_mode", "POOLED"}, {"steps", "10"}});
  std::vector<v1::Rank> ranks;
  const std::vector<TrainerReport> reports = RunRanks(args, {}, [&] { ranks = Ranks(); });
  ExpectParity(args, reports);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_FALSE(ranks[0].stream_ordered());
  EXPECT_EQ(reports[0].Note("ordered"), "ordered 0");
  const std::string log = Log(args, 0);
  EXPECT_TRUE(absl::StrContains(log, "order is by the host")) << log;
  EXPECT_TRUE(absl::StrContains(log, "no 64-bit stream memory operations")) << log;
}

TEST_F(ByStream, GrpcControlIsOrderedByHostsAndHasNoGraphs) {
  StartOnGpus(1);
  SetRanks({"SHARDD_CONTROL=grpc"});
  const Args args = kStream.With({{"unshard_mode", "POOLED"}, {"steps", "10"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  EXPECT_EQ(reports[0].Note("ordered"), "ordered 0");
  EXPECT_TRUE(absl::StrContains(Log(args, 0), "control is by gRPC alone")) << Log(args, 0);
  const Args graphs = kStream.With({{"name", "graphs"}, {"graph", "1"}, {"steps", "2"}});
  EXPECT_TRUE(OneIsRefused(RunRanks(graphs), "set SHARDD_CONTROL=ring"));
}

// A graph's values are constants: its words are set and reset by each launch, and everything that is counted, the host
// counts.
TEST_F(ByStream, GraphStepsTrainAsTheUnshardedRunAtEveryLaunch) {
  StartOnGpus(1);
  const Args args = kStream.With({{"graph", "1"}, {"micro", "2"}, {"lr", "0.003"}, {"param_dtype", "bf16"}});
  const std::vector<TrainerReport> reports = RunRanks(args);
  ExpectParity(args, reports);
  for (const TrainerReport& report : reports) {
    EXPECT_EQ(report.Note("captured"), "captured 1");
    EXPECT_TRUE(absl::StrContains(report.Note("refused"), "is being captured into a CUDA graph"))
        << report.Note("refused");
  }
}

// What does not fit keeps the driver's call, until the GPU has come to it past waits for what the host does meanwhile.
TEST_F(ByStream, AGraphLongerThanItsGpusQueueTrainsRight) {
  StartOnGpus(1);
  if (!testing::OnRealGpus()) SetRanks({"FAKE_CUDA_QUEUE_LIMIT=48"});  // a real one's is full from 64 nodes on
  const Args args = kStream.With({{"graph", "1"}, {"micro", "3"}, {"steps", "10"}});
  ExpectParity(args, RunRanks(args));
}

TEST_F(ByStream, RanksWithGraphsTrainBesideRanksWithoutOnTwoGpus) {
  StartOnGpus(2);
  const Args args = kStream.With({{"unshard_mode", "ZERO_COPY"}, {"max_norm", "0.1"}, {"steps", "20"}});
  ExpectParity(args, RunRanks(args, {{1, {{"graph", "1"}}}}));
}

TEST_F(ByStream, AGraphOfAJobWhoseParametersMoveIsRefused) {
  StartOnGpus(1);
  const Args args = kStream.With({{"graph", "1"}, {"unshard_mode", "POOLED"}, {"steps", "2"}});
  EXPECT_TRUE(OneIsRefused(RunRanks(args), "got unshardMode POOLED, want ZERO_COPY"));
}

// The one that goes on is inside of its launch: its graph is let go, and captured anew in the next session.
TEST_F(ByStream, ReplacingARankKilledDuringAnothersGraphChangesNoResult) {
  StartOnGpus(1);
  const Args args = kStream.With({{"graph", "1"}, {"micro", "3"}, {"steps", "8"}, {"recover", "1"}});
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  Child survivor = StartRank(0, args);
  Child victim = StartRank(1, args.With({{"pause", "launch@3"}}));
  AwaitPause(args, "launch", 1);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() == 3; }));
  victim.Kill(SIGKILL);
  const std::vector<TrainerReport> reports = ReplaceKilledRank(args, victim, survivor);
  ExpectSame(reports, want);
  EXPECT_EQ(reports[0].Note("captured"), "captured 2");
  EXPECT_TRUE(absl::StrContains(reports[0].Note("aborted 3"), "launch_graph")) << reports[0].Note("aborted 3");
}

TEST_F(ByStream, ADaemonKilledDuringAGraphLeavesNoStreamBehind) {
  StartOnGpus(1);
  const Args args = kStream.With({{"graph", "1"}, {"micro", "3"}, {"steps", "8"}, {"timeout_ms", "60000"}});
  Child waits = StartRank(0, args);
  Child late = StartRank(1, args.With({{"pause", "launch@3"}}));
  AwaitPause(args, "launch", 1);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() == 3; }));
  kill(daemon_pid(), SIGKILL);
  WaitForDaemon();
  LetGo(args, "launch", 1);
  const int64_t begin = NowMs();
  EXPECT_EQ(waits.Wait(), 0);
  EXPECT_EQ(late.Wait(), 0);
  EXPECT_LT(NowMs() - begin, 20000);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Report(args, rank).code, static_cast<int>(Code::kUnavailable)) << Report(args, rank).message;
    EXPECT_FALSE(Report(args, rank).Note("drained").empty());
  }
}

// Its GPU has not come to the signal behind its gradients: they are not read. The signal lands in the next epoch.
TEST_F(ByStream, AKilledRanksLateSignalTouchesNobody) {
  SHARDD_NEEDS_FAKE_GPUS("it holds what it writes");
  StartOnGpus(2);
  const Args args = kStream.With({{"steps", "10"}, {"recover", "1"}, {"unshard_mode", "POOLED"}});
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  ExpectAllOk(want);
  const std::string hold = File("hold");
  Child survivor = StartRank(0, args);
  Child victim = StartRankWithHeldSignals(args, hold);
  // Its step is sent, and cannot be decided; so it never comes to the next one's gradients by itself.
  EXPECT_EQ(Job().committed_step(), 4);
  victim.Kill(SIGKILL);
  EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
  Child replacement = StartRank(1, args);
  ASSERT_TRUE(PollUntil([&] { return Job().committed_step() > 5; }));
  unlink(hold.c_str());  // what the dead one's GPU still had lands
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::vector<TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  EXPECT_FALSE(reports[0].Note("aborted 4").empty()) << "the step must not have been decided without its GPU";
  ExpectSame(reports, want);
}

TEST_F(ByStream, ReplacingARankKilledAtAnyMomentChangesNoResult) {
  StartOnGpus(1);
  const Args args = kStream.With({{"steps", "8"}, {"recover", "1"}});
  ExpectReplacedRanksChangeNothing(args, {"read_mid@3", "submitted_head@4", "step_sent@5"}, /*aborts=*/false);
}

// Its host gives up while its GPU still has the kernels, and their signals, before it; then it does all again.
TEST_F(ByStream, AnAbandonedBackwardIsDoneAgainInTheSameSession) {
  StartOnGpus(2);
  const Args args = kStream.With({{"steps", "8"}, {"unshard_mode", "POOLED"}});
  const std::vector<TrainerReport> want = RunRanks(args.With({{"name", "undisturbed"}}));
  const std::vector<TrainerReport> reports = RunRanks(args, {{1, {{"fail", "submitted_head@3"}}}}, [&] {
    EXPECT_EQ(Job().counters().abandons(), 1);
    EXPECT_EQ(Job().counters().aborts(), 0);
  });
  ExpectAllOk(reports);
  ExpectSame(reports, want);
}

// Each rank's host stands still until the other gives what it has not come to: added out of turn, as without streams.
TEST_F(ByStream, RanksWithDifferentGroupOrdersDoNotDeadlock) {
  StartOnGpus(2);
  const Args args = kStream.With({{"steps", "12"}, {"unshard_mode", "POOLED"}, {"micro", "2"}});
  const std::vector<TrainerReport> reports =
      RunRanks(args, {{0, {{"order", "head,mid,embed,root"}}}, {1, {{"order", "root,embed,mid,head"}}}});
  ExpectParity(args, reports);
}

TEST_F(ByStream, AStreamsOverlongWaitIsEndedAndNamed) {
  StartOnGpus(1);
  const Args args = kStream.With({{"steps", "5"}});
  Child waits = StartRank(0, args.With({{"pause", "read_mid@2"}, {"timeout_ms", "3000"}}));
  Child late = StartRank(1, args.With({{"pause", "before_step@1"}, {"timeout_ms", "60000"}}));
  AwaitPause(args, "read_mid", 0);
  AwaitPause(args, "before_step", 1);
  absl::SleepFor(absl::Seconds(4));  // longer than the wait's time
  LetGo(args, "read_mid", 0);
  EXPECT_EQ(waits.Wait(), 0);
  const TrainerReport report = Report(args, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kDeadlineExceeded)) << report.message;
  for (const char* part : {"wait_unshard group \"(root)\"", "did not come to stream 0x", "rank=0", "shardd_reattach"}) {
    EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
  }
  EXPECT_FALSE(report.Note("drained").empty());
  LetGo(args, "before_step", 1);  // and the other one is told
  EXPECT_EQ(late.Wait(), 0);
  EXPECT_EQ(Report(args, 1).code, static_cast<int>(Code::kAborted)) << Report(args, 1).message;
}

TEST_F(ByStream, AHangingStreamsRankIsNamedAndTheEpochEnds) {
  StartOnGpus(1);
  const Args args = kStream.With({{"steps", "5"}, {"silence_ms", "1500"}, {"timeout_ms", "60000"}});
  Child first = StartRank(0, args);
  Child hangs = StartRank(1, args.With({{"hang", "2"}}));
  EXPECT_EQ(first.Wait(), 0);
  const TrainerReport report = Report(args, 0);
  EXPECT_EQ(report.code, static_cast<int>(Code::kAborted)) << report.message;
  for (const char* part : {"SubmitGradients group \"mid\"", "the stream of rank 1 on cuda:0", "rank=1"}) {
    EXPECT_TRUE(absl::StrContains(report.message, part)) << part << ": " << report.message;
  }
  std::ofstream(Folder(args) + "/go.hang.1").flush();
  EXPECT_EQ(hangs.Wait(), 0);
}

}  // namespace
}  // namespace shardd::e2e
