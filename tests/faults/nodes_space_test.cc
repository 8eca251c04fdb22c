// A machine without room for this node's part of a job that is cut over nodes: in a process with mounts of its own. The
// slabs are as long as the whole model's, and take what the part takes.

#include <string>

#include "absl/strings/str_cat.h"
#include "common/versions/versions.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/own_mounts.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kSlackBytes = 8 * kMiB;  // promised to the job that there is

class FullMachineOfANode : public BadInput {
 protected:
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
    request.set_protocol_version(kProtocolVersions.newest);
    return request;
  }
  const MemoryOfTheMachine memory_{File("meminfo")};
};

TEST_F(FullMachineOfANode, OnlyItsPartOfAJobHasToFit) {
  if (!HasOwnMounts()) return RunThisTestWithOwnMounts();
  memory_.Say(int64_t{16} << 20);
  StartDaemonWithJob({"--peer_listen=127.0.0.1:0", "--peer_address=node0.test:1"});
  const v1::OpenJobRequest large = Cut("large", 64 * kMiB);
  const auto plan = PlanShards(large.spec(), 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_GT(plan->memory.shards_bytes + plan->memory.gradients_bytes,
            plan->memory.held_shards_bytes + plan->memory.held_gradients_bytes + 2 * kSlackBytes)
      << "what is other nodes' is to make a difference";
  const int64_t part_bytes = plan->memory.TotalBytes(1);
  const e2e::Footprint before = DaemonFootprint();
  RawClient client(socket());
  const int64_t too_little_bytes = part_bytes - kMiB;
  memory_.Say(too_little_bytes >> 10);
  const absl::Status status = client.Open(large).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "open job \"large\"");
  ExpectStatus(status, absl::StatusCode::kResourceExhausted,
               absl::StrCat("got ", too_little_bytes / 1024 * 1024, " bytes free, want "));
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  memory_.Say((part_bytes + kSlackBytes) >> 10);
  const auto opened = client.Open(large);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(client.Close(opened->job_id()).ok());
  EXPECT_TRUE(testing::PollUntil([&] { return DaemonFootprint().shared_maps == before.shared_maps; }));
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
