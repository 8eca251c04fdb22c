// A state directory without room for this node's part of a job that is cut over nodes: in a process with mounts of its
// own. The slabs are as long as the whole model's, and take what the part takes.

#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/version.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/own_mounts.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kShmBytes = 64 * kMiB;

class FullStateDirOfANode : public BadInput {
 protected:
  void StartNode() {
    tmpfs_.emplace(File("small"), kShmBytes);
    ASSERT_TRUE(tmpfs_->mounted());
    StartDaemonWithJob({"--state_dir=" + File("small"), "--peer_listen=127.0.0.1:0", "--peer_address=node0.test:1"});
  }
  // Of two nodes with a rank each, this being the first; `shards_bytes` on both together.
  v1::OpenJobRequest Cut(const std::string& name, int64_t shards_bytes) {
    v1::OpenJobRequest request;
    *request.mutable_spec() = SpecOf({{"name", name},
                                      {"world", "1"},
                                      {"strategy", "FULL_SHARD"},
                                      {"optimizer", "sgd"},
                                      {"nodes", "node0.test:1,node1.test:1"}});
    SetShape(*request.mutable_spec(), {shards_bytes / 4});
    request.set_node(0);
    request.set_protocol_version(kProtocolVersion);
    return request;
  }
  int64_t Free() const { return FreeBytes(File("small")); }
  // Files, folders and memory of jobs.
  int64_t Left() const {
    const auto files = std::filesystem::recursive_directory_iterator(File("small"));
    return DaemonFootprint().shared_maps + std::distance(begin(files), end(files));
  }

 private:
  std::optional<SmallTmpfs> tmpfs_;
};

TEST_F(FullStateDirOfANode, TakesAPartOfWhatWouldNotFitAndRefusesAPartThatDoesNot) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_NO_FATAL_FAILURE(StartNode());
  RawClient client(socket());
  const int64_t free_bytes = Free();
  const int64_t left = Left();
  const absl::Status status = client.Open(Cut("large", 3 * kShmBytes)).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"large\"");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, File("small"));
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, absl::StrCat("got ", free_bytes, " bytes free, want "));
  EXPECT_EQ(Free(), free_bytes);
  EXPECT_EQ(Left(), left);
  const auto opened = client.Open(Cut("large", 3 * kShmBytes / 2));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_LT(Free(), free_bytes - 3 * kShmBytes / 4);
  EXPECT_TRUE(client.Close(opened->job_id()).ok());
  EXPECT_TRUE(testing::PollUntil([&] { return Free() == free_bytes; })) << Free();
  ExpectJobIntact();
}

// To the byte: what was planned fits, and the journal takes a page more.
TEST_F(FullStateDirOfANode, WithoutSpaceForTheJournalRefusesTheJobAndLeavesNothing) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  ASSERT_NO_FATAL_FAILURE(StartNode());
  RawClient client(socket());
  const v1::OpenJobRequest request = Cut("nearly", 8 * kMiB);
  auto plan = PlanShards(request.spec());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t left_bytes = RoundUpToPage(plan->memory.held_shards_bytes) +
                             RoundUpToPage(plan->memory.held_optimizer_bytes) +
                             RoundUpToPage(plan->memory.journal_bytes);
  ASSERT_LT(left_bytes, 8 * kMiB);
  ASSERT_TRUE(FillTo(File("small"), left_bytes));
  const int64_t left = Left();
  const absl::Status status = client.Open(request).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"nearly\": journal: allocate ");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, File("small"));
  EXPECT_EQ(Free(), left_bytes);
  EXPECT_EQ(Left(), left);
  const auto smaller = client.Open(Cut("nearly", 4 * kMiB));
  ASSERT_TRUE(smaller.ok()) << smaller.status();
  EXPECT_TRUE(client.Close(smaller->job_id()).ok());
  unlink(File("small/filling").c_str());
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
