#ifndef SHARDD_TESTS_E2E_KEPT_CLUSTER_H_
#define SHARDD_TESTS_E2E_KEPT_CLUSTER_H_

// A cluster whose jobs outlive their daemon: a custodian stands beside it.

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/ranks/step_limit.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {

// Ranks train by the daemon's optimizer, and store into parameters between its steps.
inline const Args kEdits = {{"model", "blocks"}, {"blocks", "2"},         {"numel", "30011"},     {"recover", "1"},
                            {"keep_every", "1"}, {"trainers_write", "1"}, {"timeout_ms", "60000"}};

class KeptCluster : public Cluster {
 protected:
  void StartCustodian() {
    const std::string log = File("custodian.log");
    custodian_ = std::make_unique<testing::Child>(
        testing::Spawn({testing::ProgramPath("shardd-custodian"), "--listen=unix:" + Custody()}, {.log = log}));
    ASSERT_TRUE(testing::PollUntil([this] { return access(Custody().c_str(), F_OK) == 0; }));
  }
  std::string Custody() const { return File("custody.sock"); }
  // Each daemon from now on has these.
  void KeptOn(std::string devices, std::vector<std::string> environment) {
    devices_ = std::move(devices);
    environment_ = std::move(environment);
  }
  void StartKept() {
    std::vector<std::string> flags = {"--custodian=unix:" + Custody()};
    flags.insert(flags.end(), flags_.begin(), flags_.end());
    StartDaemon(flags, devices_, environment_);
    if (custodian_ != nullptr && !empty_.has_value()) empty_ = EmptyWith(*custodian_);
  }
  // REQUIRES: a custodian ran when the first daemon was started with StartKept.
  void ExpectNothingLeft() const { Cluster::ExpectNothingLeft(empty_.value(), *custodian_); }
  void KillDaemon(int signal_number = SIGKILL) {
    ASSERT_EQ(kill(daemon_pid(), signal_number), 0);
    WaitForDaemon();
  }
  static Args Training(int steps, const char* optimizer = "adamw") {
    return {{"steps", absl::StrCat(steps)}, {"recover", "1"}, {"optimizer", optimizer}};
  }
  // Ranks report all bits of what they hold, for ExpectUndisturbed.
  testing::Child StartRank(int rank, const Args& args) { return Cluster::StartRank(rank, args.With({{"bits", "1"}})); }
  std::vector<testing::Child> StartRanks(const Args& args) {
    std::vector<testing::Child> ranks;
    for (int rank = 0; rank < args.Int("world", 2); ++rank) ranks.push_back(StartRank(rank, args));
    return ranks;
  }
  std::vector<TrainerReport> Reports(const Args& args) {
    std::vector<TrainerReport> reports;
    for (int rank = 0; rank < args.Int("world", 2); ++rank) reports.push_back(Report(args, rank));
    return reports;
  }
  // That a rank may wait to attach again.
  static int64_t MostMs(const Args& args) { return args.Int("timeout_ms", 120'000) + 1000; }
  // As SayEnough and UntilEnough, of this test's ranks.
  Args UntilEnough(const Args& args) const { return e2e::UntilEnough(args, File("enough")); }
  void SayEnough() const { e2e::SayEnough(File("enough")); }
  void ExpectAsUndisturbed(const std::vector<TrainerReport>& reports, const Args& args) {
    const std::vector<TrainerReport> want = RunRanks(AsManySteps(args).With({{"name", "undisturbed"}, {"bits", "1"}}));
    for (const TrainerReport& report : want) EXPECT_FALSE(report.bits.empty());
    ExpectSame(reports, want);
  }
  // What came of it is what comes of a run that nobody disturbs.
  void ExpectUndisturbed(const Args& args, std::vector<testing::Child>& ranks) {
    // Of a long run many steps are left.
    for (testing::Child& rank : ranks) EXPECT_EQ(rank.Wait(10 * testing::kLimit), 0);
    const std::vector<TrainerReport> reports = Reports(args);
    ExpectAllOk(reports);
    for (const TrainerReport& report : reports) EXPECT_LE(report.waited_ms, MostMs(args));
    ExpectAsUndisturbed(reports, args);
  }
  // Which memory of that name a process maps: an inode; "": none.
  static std::string MappedBy(const testing::Child& process, const std::string& name) {
    std::ifstream maps(absl::StrCat("/proc/", process.pid(), "/maps"));
    for (std::string line; std::getline(maps, line);) {
      const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(' ', 5));
      if (fields.size() == 6 && absl::StrContains(fields[5], name)) return fields[4];
    }
    return "";
  }
  int64_t Committed() { return Job().committed_step(); }

  std::unique_ptr<testing::Child> custodian_;
  std::string devices_ = "cpu:2";
  std::vector<std::string> environment_;
  std::vector<std::string> flags_;

 private:
  std::optional<Empty> empty_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_KEPT_CLUSTER_H_
