// Misuse of the unsharded pool.

#include <functional>
#include <string>

#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

namespace shardd::faults {
namespace {

class Pooled : public BadInput {
 protected:
  void ExpectRefused(const std::function<void(RawClient&)>& act, absl::StatusCode code, const std::string& text) {
    StartDaemonWithJob({}, {{"unshard_mode", "POOLED"}});
    {
      RawClient client(socket());
      ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
      act(client);
      ExpectStatus(client.stream().End(), code, text);
    }
    ExpectJobIntact();
  }
};

constexpr int kEmbed = 1;

TEST_F(Pooled, ReshardOfWhatWasNeverUnshardedIsRefused) {
  ExpectRefused([](RawClient& c) { c.Send(Record(Opcode::kReshard, kEmbed)); }, absl::StatusCode::kFailedPrecondition,
                "\"embed\"");
}

// A group that is unsharded twice is in one slot and has two users; a third Reshard has nobody to speak for.
TEST_F(Pooled, AGroupThatIsUnshardedTwiceIsReshardedTwice) {
  ExpectRefused(
      [this](RawClient& c) {
        const uint64_t copies = Job().counters().unshard_copies();
        c.Send(Record(Opcode::kUnshard, kEmbed, v1::PHASE_FORWARD));
        c.Send(Record(Opcode::kUnshard, kEmbed, v1::PHASE_FORWARD));
        ASSERT_TRUE(
            testing::PollUntil([this] { return Ranks()[0].handles(kEmbed).storage_state() == "UNSHARDED(2)"; }));
        EXPECT_LE(Job().counters().unshard_copies(), copies + 1);
        c.Send(Record(Opcode::kReshard, kEmbed));
        c.Send(Record(Opcode::kReshard, kEmbed));
        ASSERT_TRUE(c.Consumed());
        c.Send(Record(Opcode::kReshard, kEmbed));
      },
      absl::StatusCode::kFailedPrecondition, "\"embed\"");
}

TEST_F(Pooled, UnshardingMoreGroupsThanThePoolHoldsIsRefused) {
  StartDaemon();
  v1::JobSpec spec =
      SpecOf({{"model", "blocks"}, {"blocks", "6"}, {"numel", "100"}, {"world", "1"}, {"unshard_mode", "POOLED"}});
  spec.mutable_config()->set_max_inflight_unshards(1);
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(spec, 0).ok());
    client.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("job", "parameters", "version 1"); }));
    ASSERT_LT(client.plan().pool_quota, static_cast<int>(client.plan().groups.size()));
    for (int group = 0; group < client.plan().pool_quota; ++group) {
      client.Send(Record(Opcode::kUnshard, group, v1::PHASE_FORWARD));
    }
    ASSERT_TRUE(client.Consumed());
    client.Send(Record(Opcode::kUnshard, client.plan().pool_quota, v1::PHASE_FORWARD));
    ExpectStatus(client.stream().End(), absl::StatusCode::kResourceExhausted, "reshard one first");
  }
  ExpectServesOthers();
}

TEST_F(Pooled, StepWithAGroupThatIsStillUnshardedIsRefused) {
  ExpectRefused(
      [](RawClient& c) {
        c.Send(Record(Opcode::kUnshard, kEmbed, v1::PHASE_FORWARD));
        SendStep(c, GoodStep());
      },
      absl::StatusCode::kFailedPrecondition, "\"embed\"");
}

}  // namespace
}  // namespace shardd::faults
