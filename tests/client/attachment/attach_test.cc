// Attach, reattach, detach against a real daemon.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/c/shardd.h"
#include "common/shm/unique_fd.h"
#include "tests/client/client_fixture.h"
#include "tests/common/shm/process_util.h"

namespace shardd::testing_client {
namespace {

TEST(Attach, InfoDescribesRankGroupsAndParameters) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  const shardd_job_info info = rank.Info();
  EXPECT_EQ(info.rank, 0);
  EXPECT_EQ(info.world_size, 1);
  EXPECT_EQ(info.group_count, 3);
  EXPECT_EQ(info.param_count, 6);
  EXPECT_EQ(info.committed_step, 0);
  EXPECT_EQ(info.version, 0u);
  EXPECT_EQ(info.created, 1);
  EXPECT_GE(info.epoch, 1u);
  EXPECT_STREQ(info.device, "cpu:0");
  EXPECT_EQ(info.address, daemon.address());
  const int b = rank.Group("b");
  const shardd_group_info group = rank.GroupInfo(b);
  EXPECT_STREQ(group.name, "b");
  EXPECT_EQ(group.param_count, 2);
  EXPECT_EQ(group.trainable, 1);
  const int bias = rank.Param("module.b.bias");  // a wrapper prefix is understood
  const shardd_param_info param = rank.ParamInfo(bias);
  EXPECT_STREQ(param.fqn, "b.bias");
  EXPECT_EQ(param.group, b);
  EXPECT_EQ(param.ndim, 1);
  EXPECT_EQ(param.shape[0], 33);
  EXPECT_EQ(param.dtype, SHARDD_FLOAT32);
  EXPECT_EQ(group.params[param.index_in_group], bias);
  EXPECT_EQ(rank.ParamInfo(rank.Param("frozen")).requires_grad, 0);
  EXPECT_EQ(rank.Param("nothing"), -1);
  EXPECT_EQ(rank.Group("nothing"), -1);
  shardd_param_info unknown = {};
  unknown.struct_size = sizeof(unknown);
  EXPECT_C_ERROR(shardd_get_param_info(rank.job(), 6, &unknown), kInvalidArgument, "got 6, want 0 to 5");
  EXPECT_C_ERROR(shardd_unshard(rank.job(), 3, SHARDD_FORWARD), kInvalidArgument, "got 3, want 0 to 2");
}

TEST(Attach, ASecretIsTheOptionsOrTheEnvironments) {
  Daemon daemon;
  const std::string json = ToJson(SmallSpec("job", 2));
  const auto attach = [&](int rank, const char* secret, shardd_job** job) {
    shardd_attach_options options = {};
    options.struct_size = sizeof(options);
    options.spec_json = json.c_str();
    options.rank = rank;
    const std::string address = daemon.address();
    options.address = address.c_str();
    options.job_secret = secret;
    return Result(shardd_attach(&options, job));
  };
  shardd_job* first = nullptr;
  shardd_job* second = nullptr;
  const Result opened = attach(0, "0123456789abcdef", &first);
  ASSERT_TRUE(opened.ok()) << opened;
  const Result without = attach(1, nullptr, &second);
  EXPECT_EQ(without.code(), kPermissionDenied) << without;
  EXPECT_NE(without.message().find("SHARDD_JOB_SECRET"), std::string::npos) << without;
  EXPECT_EQ(attach(1, "0123456789abcdeF", &second).code(), kPermissionDenied);
  EXPECT_EQ(attach(1, "", &second).code(), kInvalidArgument);
  setenv("SHARDD_JOB_SECRET", "too short", 1);
  EXPECT_EQ(attach(1, nullptr, &second).code(), kInvalidArgument);
  setenv("SHARDD_JOB_SECRET", "0123456789abcdef", 1);
  const Result with = attach(1, nullptr, &second);
  unsetenv("SHARDD_JOB_SECRET");
  ASSERT_TRUE(with.ok()) << with;
  // What is asked of the job later has it, too.
  char* described = nullptr;
  ASSERT_C_OK(shardd_describe_job(second, &described));
  EXPECT_NE(std::string(described).find("\"has_secret\":true"), std::string::npos) << described;
  EXPECT_EQ(std::string(described).find("0123456789"), std::string::npos) << described;
  shardd_string_free(described);
  EXPECT_C_OK(shardd_detach(first, 0));
  EXPECT_TRUE(Eventually([&] { return Result(shardd_reattach(second)).ok(); })) << "when it has heard of the end";
  EXPECT_C_OK(shardd_detach(second, 0));
}

// Rank 1 comes first, with a description that no daemon of one node can serve.
TEST(Attach, LaterRanksHearOfOneThatWasRefusedEarlier) {
  Daemon daemon(2);
  v1::JobSpec other = SmallSpec("job", 2);
  other.mutable_config()->mutable_nodes()->add_addresses("here:1");
  other.mutable_config()->mutable_nodes()->add_addresses("there:1");
  Rank refused;
  EXPECT_C_ERROR(refused.Attach(daemon.address(), other, 1), kFailedPrecondition, "no address for others");
  Rank waits;
  EXPECT_C_ERROR(waits.Attach(daemon.address(), SmallSpec("job", 2), 0), kFailedPrecondition, "rank 1 was refused");
}

// The number of the descriptor that would be opened after `more` others.
rlim_t FreeDescriptor(int more) {
  std::vector<UniqueFd> opened;
  for (int i = 0; i <= more; ++i) opened.emplace_back(fcntl(0, F_DUPFD_CLOEXEC, 0));
  return static_cast<rlim_t>(opened.back().get());
}

// However few files the program may still open: attach says so, leaves none behind, and works once it may.
TEST(Attach, WithoutDescriptorsItEndsByNameAndLeavesNoneBehind) {
  Daemon daemon;
  {
    Rank rank;  // what the libraries keep for the process
    ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int open_files = testing::CountFds();
  int refused = 0;
  for (int more = 0;; ++more) {
    SCOPED_TRACE(more);
    ASSERT_LT(more, 64);
    rlimit limit = before;
    limit.rlim_cur = FreeDescriptor(more);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    Rank rank;
    const absl::Time start = absl::Now();
    const Result result = rank.Attach(daemon.address(), SmallSpec("job", 1), 0, absl::Seconds(5));
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_LT(absl::Now() - start, absl::Seconds(15));
    if (result.ok()) break;
    ++refused;
    EXPECT_NE(result.message().find("open files"), std::string::npos) << result;
  }
  EXPECT_GT(refused, 2);
  // Fewer: what the first rank had was still being closed when it was counted.
  EXPECT_TRUE(Eventually([&] { return testing::CountFds() <= open_files; }))
      << testing::CountFds() << ", want at most " << open_files;
}

TEST(Attach, ARankIsAttachedOnce) {
  Daemon daemon;
  Rank first;
  Rank second;
  ASSERT_C_OK(first.Attach(daemon.address(), SmallSpec("job", 2), 1));
  const absl::Time start = absl::Now();
  EXPECT_C_ERROR(second.Attach(daemon.address(), SmallSpec("job", 2), 1), kAlreadyExists, "rank 1");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  ASSERT_C_OK(second.Attach(daemon.address(), SmallSpec("job", 2), 0));
  EXPECT_EQ(second.Info().created, 0);
}

TEST(Attach, ADifferentTreeIsRefusedWithTheFirstDifference) {
  Daemon daemon;
  Rank first;
  ASSERT_C_OK(first.Attach(daemon.address(), SmallSpec("job", 2), 0));
  v1::JobSpec other = SmallSpec("job", 2);
  other.mutable_tree()->mutable_modules(1)->mutable_parameters(0)->set_shape(0, 34);
  Rank second;
  EXPECT_C_ERROR(second.Attach(daemon.address(), other, 1), kFailedPrecondition, "a.weight");
  EXPECT_C_ERROR(second.Attach(daemon.address(), SmallSpec("job", 3), 1), kFailedPrecondition, "world");
}

TEST(Attach, AJobIsGoneWhenAllRanksHaveFinished) {
  Daemon daemon;
  for (int round = 0; round < 2; ++round) {
    Rank rank;
    ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
    EXPECT_EQ(rank.Info().created, 1);
    rank.WriteAll(1);
    EXPECT_C_OK(shardd_detach(rank.Release(), 1));
  }
}

TEST(Attach, AJobIsKeptWhenARankDetachesWithoutFinishing) {
  Daemon daemon;
  for (int round = 0; round < 2; ++round) {
    Rank rank;
    ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
    EXPECT_EQ(rank.Info().created, round == 0 ? 1 : 0);
    EXPECT_EQ(rank.Info().version, round == 0 ? 0u : 1u);
    if (round == 0) {
      rank.WriteAll(1);
    }
    EXPECT_C_OK(shardd_detach(rank.Release(), 0));
  }
}

// Whose epoch ends before it says that it has finished: it attaches again for that, unless the program has been told,
// which may be about to begin again.
TEST(Attach, OnlyRanksToldOfAnAbortHaveNotFinished) {
  Daemon daemon;
  for (const bool told : {false, true}) {
    SCOPED_TRACE(told);
    const std::string name = told ? "told" : "untold";
    Rank first, second;
    ASSERT_C_OK(first.Attach(daemon.address(), SmallSpec(name, 2), 0));
    ASSERT_C_OK(second.Attach(daemon.address(), SmallSpec(name, 2), 1));
    EXPECT_C_OK(shardd_detach(second.Release(), 0));
    if (told) {
      EXPECT_C_ERROR(shardd_commit_parameters(first.job()), kAborted, "rank=1");
      EXPECT_C_ERROR(shardd_detach(first.Release(), 1), kAborted, "rank=1");
    } else {
      EXPECT_C_OK(shardd_detach(first.Release(), 1));
    }
  }
}

TEST(Attach, ReattachOfALivingSessionIsRefused) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  EXPECT_C_ERROR(shardd_reattach(rank.job()), kFailedPrecondition, "alive");
}

TEST(Attach, WithoutADaemonTheErrorSaysHowToStartOne) {
  TempDir dir;
  Rank rank;
  EXPECT_C_ERROR(rank.Attach("unix:" + dir.File("none.sock"), SmallSpec("job", 1), 0), kUnavailable,
                 "none.sock\": no daemon there (No such file or directory); start one with `shardd --listen=unix:" +
                     dir.File("none.sock"));
}

TEST(Attach, ErrorsSayThatAClosedJobIsGone) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  CloseJob(daemon.address(), "job");
  ASSERT_TRUE(Eventually([&] { return Result(shardd_backward_done(rank.job(), 0)).code() == kNotFound; }));
  EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_FORWARD), kNotFound, "; attach anew");
  EXPECT_C_ERROR(shardd_reattach(rank.job()), kNotFound, "; attach anew");
}

TEST(Attach, ADaemonsDeathIsNoticedSoonAndItsSuccessorFound) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 2), 0));
  daemon.process().Kill();
  const absl::Time start = absl::Now();
  // Rank 1 never comes: without the daemon's death this would wait for the limit.
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kUnavailable, "daemon");
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  EXPECT_C_ERROR(shardd_unshard(rank.job(), 0, SHARDD_FORWARD), kUnavailable, "daemon");
  daemon.Restart();
  EXPECT_C_OK(shardd_reattach(rank.job()));
  EXPECT_EQ(rank.Info().rank, 0);
}

TEST(Attach, RanksWaitForADaemonAsLongAsOptionsSay) {
  Daemon daemon;
  const std::string json = ToJson(SmallSpec("job", 1));
  shardd_attach_options options = {};
  options.struct_size = sizeof(options);
  options.spec_json = json.c_str();
  const std::string address = daemon.address();
  options.address = address.c_str();
  const auto wait = [&] {
    shardd_job* job = nullptr;
    EXPECT_C_OK(shardd_attach(&options, &job));
    daemon.process().Kill();
    EXPECT_C_ERROR(shardd_commit_parameters(job), kUnavailable, "daemon");
    const absl::Time start = absl::Now();
    EXPECT_C_ERROR(shardd_reattach(job), kUnavailable, "");
    const absl::Duration waited = absl::Now() - start;
    EXPECT_C_OK(shardd_detach(job, 0));
    daemon.Restart();
    return waited;
  };
  options.daemon_wait_ms = 1500;
  ::testing::internal::CaptureStderr();
  const absl::Duration first = wait();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("job \"job\": rank 0 waits up to 1.5s for a daemon"));
  EXPECT_GE(first, absl::Milliseconds(1500));
  EXPECT_LT(first, absl::Milliseconds(2500));
  options.daemon_wait_ms = 0;
  setenv("SHARDD_DAEMON_WAIT_MS", "300", 1);
  ::testing::internal::CaptureStderr();
  const absl::Duration second = wait();
  unsetenv("SHARDD_DAEMON_WAIT_MS");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "a pause of less than a second is not worth a line";
  EXPECT_LT(second, absl::Milliseconds(1300));
  options.daemon_wait_ms = -1;
  shardd_job* job = nullptr;
  EXPECT_C_ERROR(shardd_attach(&options, &job), kInvalidArgument, "daemon_wait_ms");
}

TEST(Attach, SurvivorsOfALostRankReattachAtTheCommittedStep) {
  Daemon daemon;
  Rank survivor;
  Rank lost;
  const v1::JobSpec spec = SmallSpec("job", 2);
  ASSERT_C_OK(survivor.Attach(daemon.address(), spec, 0));
  ASSERT_C_OK(lost.Attach(daemon.address(), spec, 1));
  ForEachRank(2, [&](int rank) {
    Rank& self = rank == 0 ? survivor : lost;
    self.WriteAll(1);
    const shardd_hyperparameters group = Sgd(0.1);
    const std::string state = rank == 0 ? "state of rank 0" : "state of rank 1";
    ASSERT_C_OK(shardd_step(self.job(), &group, 1, 0, state.data(), state.size()));
    ASSERT_C_OK(shardd_wait_step(self.job(), nullptr));
  });
  const uint64_t epoch = survivor.Info().epoch;
  EXPECT_C_OK(shardd_detach(lost.Release(), 0));
  const int group = survivor.Group("a");
  // The abort comes by itself; polled with a call that has no effect.
  ASSERT_TRUE(Eventually([&] { return Result(shardd_reattach(survivor.job())).code() != kFailedPrecondition; }));
  EXPECT_GT(survivor.Info().epoch, epoch);
  EXPECT_EQ(survivor.Info().committed_step, 1);
  EXPECT_EQ(survivor.Info().version, 2u);
  size_t size = 0;
  const void* state = shardd_trainer_state(survivor.job(), &size);
  EXPECT_EQ(std::string(static_cast<const char*>(state), size), "state of rank 0");
  survivor.Unshard(group, SHARDD_FORWARD);
  EXPECT_EQ(survivor.First(survivor.Param("a.weight")), 1);
}

TEST(Attach, AnAbortIsStickyAndSaysWho) {
  Daemon daemon;
  Rank survivor;
  Rank lost;
  ASSERT_C_OK(survivor.Attach(daemon.address(), SmallSpec("job", 2), 0));
  ASSERT_C_OK(lost.Attach(daemon.address(), SmallSpec("job", 2), 1));
  ForEachRank(2, [&](int rank) {
    if (rank == 0) {
      const Result aborted = shardd_commit_parameters(survivor.job());
      EXPECT_EQ(aborted.code(), kAborted) << aborted;
      // Who, and what to do.
      EXPECT_NE(aborted.message().find("rank=1"), std::string::npos) << aborted;
      EXPECT_NE(aborted.message().find("; call shardd_reattach and go on after step 0"), std::string::npos) << aborted;
    } else {
      // Once rank 0's command has arrived it waits for this rank.
      EXPECT_TRUE(Eventually([&] { return LastCommand(daemon.address(), "job", 0) == "CommitParameters"; }));
      EXPECT_C_OK(shardd_detach(lost.Release(), 0));
    }
  });
  EXPECT_C_ERROR(shardd_unshard(survivor.job(), 0, SHARDD_FORWARD), kAborted, "rank");
  EXPECT_C_ERROR(shardd_wait_step(survivor.job(), nullptr), kAborted, "rank");
}

TEST(Attach, AWaitThatTimesOutNamesWhatIsMissing) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 2), 0, absl::Milliseconds(300)));
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kDeadlineExceeded, "every rank has to commit");
  // Not the end of the session: the call may be made again and goes on waiting.
  EXPECT_C_ERROR(shardd_commit_parameters(rank.job()), kDeadlineExceeded, "rank=0");
}

}  // namespace
}  // namespace shardd::testing_client
