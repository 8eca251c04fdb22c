// What custodians do to daemons and their clients: a job is there for nobody before it is handed over, a full custodian
// is named, and an embedded daemon has another one when its own has died.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/faults/bad_input.h"

namespace shardd::faults {
namespace {

using testing::Child;
using testing::PollUntil;

class Custodians : public e2e::KeptCluster {
 protected:
  // The custodian stands still while a client opens a job; until it has an answer or `limit` has passed.
  void OpenWhileCustodianIsStopped(absl::Duration limit) {
    ASSERT_EQ(kill(custodian_->pid(), SIGSTOP), 0);
    std::atomic<bool> answered = false;
    std::thread opening([&] {
      opened_ = RawClient(socket()).Open(SpecOf({{"world", "1"}}));
      answered = true;
    });
    EXPECT_FALSE(PollUntil([&] { return !Job().name().empty() || (answered && opened_.ok()); }, limit))
        << "the job is there for others";
    ASSERT_EQ(kill(custodian_->pid(), SIGCONT), 0);
    opening.join();
  }

  absl::StatusOr<v1::OpenJobResponse> opened_ = absl::UnknownError("not asked");
};

TEST_F(Custodians, NobodyGetsAJobBeforeItIsHandedOver) {
  StartCustodian();
  StartKept();
  OpenWhileCustodianIsStopped(absl::Seconds(1));
  ASSERT_TRUE(opened_.ok()) << opened_.status();
  EXPECT_EQ(Job().name(), "job");
  ExpectAllOk(RunRanks({{"world", "1"}, {"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}}));
  KillDaemon();
  StartKept();
  EXPECT_EQ(Committed(), 5) << "all of it was handed over";
}

TEST_F(Custodians, OneThatDoesNotAnswerInTimeIsNamed) {
  StartCustodian();
  StartKept();
  const absl::Time begin = absl::Now();
  OpenWhileCustodianIsStopped(absl::Seconds(13));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  ExpectStatus(opened_.status(), absl::StatusCode::kDeadlineExceeded, "hand over \"");
  ExpectStatus(opened_.status(), absl::StatusCode::kDeadlineExceeded, "no answer within 5s");
  EXPECT_EQ(Job().name(), "");
  // Nothing is left of it, and the next one is kept.
  const e2e::Args args = Training(200);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  KillDaemon();
  StartKept();
  ExpectUndisturbed(args, ranks);
}

TEST_F(Custodians, OneThatIsFullIsNamedAndKeepsItsJobs) {
  custodian_ =
      std::make_unique<Child>(testing::Spawn({"/bin/sh", "-c", "ulimit -n 64; exec \"$0\" \"$@\"",
                                              testing::ProgramPath("shardd-custodian"), "--listen=unix:" + Custody()},
                                             {.log = File("custodian.log")}));
  ASSERT_TRUE(PollUntil([this] { return access(Custody().c_str(), F_OK) == 0; }));
  StartKept();
  const e2e::Args args = Training(600);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  RawClient client(socket());
  absl::Status status;
  int others = 0;
  for (; others < 64 && status.ok(); others += status.ok() ? 1 : 0) {
    status = client.Open(SpecOf({{"world", "1"}, {"name", absl::StrCat("other-", others)}})).status();
  }
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "the custodian is full");
  EXPECT_EQ(Job(absl::StrCat("other-", others)).name(), "");
  ASSERT_GT(others, 0);
  v1::JobRef ref;
  ref.set_job("other-0");
  v1::CloseJobByNameResponse closed;
  ASSERT_TRUE(client.Ask(&v1::JobsService::Stub::CloseJobByName, ref, &closed).ok());
  EXPECT_TRUE(PollUntil([&] {
    return client.Open(SpecOf({{"world", "1"}, {"name", "next"}})).ok();
  })) << "nothing is left there of what was refused";
  KillDaemon();
  StartKept();
  ExpectUndisturbed(args, ranks);
}

class EmbeddedCustodian : public Custodians {
 protected:
  ~EmbeddedCustodian() override {
    if (const pid_t left = Pid(); left > 0) kill(left, SIGKILL);
  }
  // Of the custodian that the daemon of this test has started; 0: none.
  pid_t Pid() const {
    const std::string listens = absl::StrCat("--listen=unix:", File("shardd-custody.sock"));
    std::error_code gone;
    for (const auto& process : std::filesystem::directory_iterator("/proc", gone)) {
      int pid = 0;
      if (absl::SimpleAtoi(process.path().filename().string(), &pid) &&
          absl::StrContains(testing::ReadWholeFile(process.path() / "cmdline"), listens)) {
        return pid;
      }
    }
    return 0;
  }
};

TEST_F(EmbeddedCustodian, IsReplacedWithAllJobsWhenItDies) {
  StartDaemon({"--embedded"});
  const e2e::Args args = Training(60);
  std::vector<Child> ranks = StartRanks(args.With({{"pause", "before_step@20"}}));
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "before_step", rank);
  const pid_t first = Pid();
  ASSERT_GT(first, 0);
  ASSERT_EQ(kill(first, SIGKILL), 0);
  ASSERT_TRUE(
      PollUntil([this] { return absl::StrContains(testing::ReadWholeFile(DaemonLog()), "has all jobs again"); }));
  EXPECT_GT(Pid(), 0);
  EXPECT_NE(Pid(), first);
  KillDaemon();
  StartDaemon({"--embedded"});
  EXPECT_EQ(Committed(), 20);
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "before_step", rank);
  for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
  const std::vector<e2e::TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  WaitForDaemon();  // it ends without jobs
  EXPECT_TRUE(PollUntil([this] { return Pid() == 0; }));
  StartDaemon();
  ExpectAsUndisturbed(reports, args);
}

}  // namespace
}  // namespace shardd::faults
