// The kernel kills the daemon because its memory cgroup is full. Pages of jobs stay charged there, and with the
// custodian: the next daemon goes on with them.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/gpus/purposes.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/e2e/memory_cgroup.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class OutOfMemory : public KeptCluster {};

TEST_F(OutOfMemory, AKillOfTheDaemonLosesNothing) {
  constexpr int64_t kRoomBytes = int64_t{16} << 20;
  MemoryCgroup cgroup;
  if (!cgroup.why_not().empty()) GTEST_SKIP() << cgroup.why_not();
  StartCustodian();
  StartKept();
  cgroup.Add(daemon_pid());
  const Args args = Training(300);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  const int64_t before = Committed();
  std::ofstream(absl::StrCat("/proc/", daemon_pid(), "/oom_score_adj")) << 1000 << std::flush;  // it, and not the other
  cgroup.SetLimit(cgroup.used_bytes() + kRoomBytes);
  Child other([&cgroup] {
    cgroup.Add(getpid());
    void* const memory =
        mmap(nullptr, 4 * kRoomBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? 1 : 0;
  });
  WaitForDaemon();
  other.Wait();  // it may be killed, too
  StartKept();
  EXPECT_GE(Committed(), before);
  ExpectUndisturbed(args, ranks);
}

// Passes come so fast that the snapshot would have shards of its own, which the daemon would be killed for.
TEST_F(OutOfMemory, SnapshotsStayInCopiesWhereTheirShardsDoNotFit) {
  constexpr int64_t kRoomBytes = int64_t{8} << 20;  // less than the shards
  MemoryCgroup cgroup;
  if (!cgroup.why_not().empty()) GTEST_SKIP() << cgroup.why_not();
  const Args undisturbed = {{"steps", "30"},     {"trained", "adam"},     {"model", "pass"},
                            {"blocks", "3"},     {"trainers_write", "1"}, {"numel", "2000003"},
                            {"keep_every", "0"}, {"timeout_ms", "60000"}};
  const Args args = undisturbed.With({{"pause", "before_pass@1,entered@20,updated@29"}});
  const auto at = [&](const std::string& moment, const std::function<void()>& look) {
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, moment, rank);
    look();
    for (int rank = 0; rank < 2; ++rank) LetGo(args, moment, rank);
  };
  const auto unpopulated_bytes = [this] {
    const v1::Purpose snapshot = PurposesOf(jobs())["snapshot"];
    return snapshot.planned_bytes() - snapshot.allocated_bytes();
  };
  StartDaemon();
  cgroup.Add(daemon_pid());
  std::vector<Child> ranks = StartRanks(args);
  at("before_pass", [&] { cgroup.SetLimit(cgroup.used_bytes() + kRoomBytes); });
  at("entered", [&] {
    EXPECT_GT(unpopulated_bytes(), 2 * kRoomBytes);
    cgroup.SetLimit(cgroup.used_bytes() + 100 * kRoomBytes);
  });
  at("updated", [&] { EXPECT_LT(unpopulated_bytes(), kRoomBytes) << "there is room by now"; });
  ExpectUndisturbed(undisturbed, ranks);
}

// What was taken up is charged to the daemon before, and to whatever is around both.
TEST_F(OutOfMemory, AJobIsExtendedWhereWhatWasTakenUpFitsAgain) {
  MemoryCgroup cgroup;
  if (!cgroup.why_not().empty()) GTEST_SKIP() << cgroup.why_not();
  const Args args = {{"model", "blocks"}, {"blocks", "2"},          {"numel", "1000003"},   {"steps", "6"},
                     {"extend", "3"},     {"pause", "extending@0"}, {"timeout_ms", "60000"}};
  const auto wanted_bytes = [&](std::vector<Child>& ranks) {
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    const std::string said = Report(args, 0).message;
    std::smatch match;
    EXPECT_TRUE(std::regex_search(said, match, std::regex("extend job .* bytes free, want (\\d+) bytes"))) << said;
    return match.empty() ? int64_t{0} : int64_t{std::stoll(match[1])};
  };
  StartCustodian();
  StartKept();
  cgroup.Add(daemon_pid());
  std::vector<Child> ranks = StartRanks(args);
  for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "extending", rank);
  cgroup.SetLimit(cgroup.used_bytes() + (int64_t{1} << 20));
  for (int rank = 0; rank < 2; ++rank) LetGo(args, "extending", rank);
  const int64_t beside_bytes = wanted_bytes(ranks);
  auto purposes = PurposesOf(jobs());
  int64_t taken_up_bytes = 0;
  for (const char* const slab : {"shards", "optimizer"}) taken_up_bytes += purposes[slab].allocated_bytes();
  EXPECT_GT(taken_up_bytes, 0);
  KillDaemon();
  StartKept();
  cgroup.Add(daemon_pid());
  cgroup.SetLimit(cgroup.used_bytes() + beside_bytes);
  ranks = StartRanks(args);
  EXPECT_GE(wanted_bytes(ranks), beside_bytes + taken_up_bytes);
}

}  // namespace
}  // namespace shardd::e2e
