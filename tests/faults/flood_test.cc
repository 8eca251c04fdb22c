// Clients that send faster than they are served.

#include <atomic>
#include <string>
#include <thread>

#include "common/plan/session_layout.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

constexpr int64_t kNumel = kMiB / 4;  // of the parameter: 1 MiB, as much as is staged at once
constexpr int64_t kWriteNumel = kNumel / 16;
constexpr int kMostInABatch = 16'000;  // about as many writes as a message may have, decoded

class Flood : public BadInput {
 protected:
  // A session of another job that may write its parameters, which takes the daemon's loop a while each time.
  void EnterAsWriter(RawClient& client) {
    v1::JobSpec spec = SpecOf({{"name", "flood"}, {"world", "1"}});
    SetShape(spec, {kNumel});
    ASSERT_TRUE(client.Enter(spec, 0).ok());
    client.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("flood", "parameters", "version 1"); }));
    client.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
    ASSERT_TRUE(client.Consumed());
  }
  static v1::SessionRequest Writes(const RawClient& client, int count) {
    v1::SessionRequest request;
    for (int i = 0; i < count; ++i) {
      v1::WriteParameters& write = *request.mutable_commands()->add_commands()->mutable_write_parameters();
      write.set_numel(kWriteNumel);
      write.set_staging_offset_bytes(client.layout().payload_offset_bytes);
    }
    return request;
  }
  uint64_t Executed() { return Ranks("flood")[0].commands(); }
};

// Batches that take several times as long to execute as to receive, from a client that reads no event: they wait in
// the client, not in the daemon, and others are served.
TEST_F(Flood, OfCommandsWaitsInTheClient) {
  // AddressSanitizer keeps 256 MiB of freed memory: enough more batches have to come that a backlog would show.
  constexpr int kLeastBatches = testing::kSanitized ? 320 : 48;
  // A few batches in several shapes (on the way, decoded, being executed), where all of them would be twice as much or
  // more.
  constexpr int64_t kMostBytes = (testing::kSanitized ? 384 : 48) * kMiB;
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAsWriter(client));
    const v1::SessionRequest request = Writes(client, kMostInABatch);
    const uint64_t executed = Executed();
    ASSERT_TRUE(client.stream().Write(request));  // old values are kept from now on: they are no backlog
    ASSERT_TRUE(testing::PollUntil([&] { return Executed() == executed + kMostInABatch; }));
    const int64_t before = ResidentBytes();

    std::atomic<bool> served = false;
    std::atomic<int> batches = 0;
    std::atomic<int64_t> most = 0;
    std::thread flooding([&] {
      while ((!served || batches < kLeastBatches) && client.stream().Write(request)) {
        ++batches;
        most = std::max<int64_t>(most, ResidentBytes());
      }
    });
    ExpectServesOthers();
    served = true;
    flooding.join();
    EXPECT_GE(batches, kLeastBatches) << "the daemon ended the session: " << client.stream().End();
    EXPECT_LT(most - before, kMostBytes);
    EXPECT_EQ(Ranks("flood")[0].session_id(), client.session().session_id());
  }
  ExpectJobIntact();
}

// Batches follow one another for as long as their client likes; whoever comes meanwhile is served before the last one.
TEST_F(Flood, InBatchesThatFollowOneAnotherHoldsUpNobody) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAsWriter(client));
    const uint64_t executed = Executed();
    std::atomic<bool> served = false;
    std::thread flooding([&] {
      const v1::SessionRequest request = Writes(client, kMostInABatch);
      while (!served && client.stream().Write(request)) {
      }
    });
    EXPECT_TRUE(testing::PollUntil([&] { return Executed() > executed; }));
    ExpectServesOthers();
    EXPECT_FALSE(served.exchange(true));
    flooding.join();
    EXPECT_EQ(Ranks("flood")[0].session_id(), client.session().session_id());
  }
  ExpectJobIntact();
}

// What is said of each parameter of one large group is settled at the step, on the daemon's loop.
TEST_F(Flood, OfWordsAboutGradientsOfALargeGroupHoldsUpNobody) {
  constexpr int kParameters = 100'000;
  StartDaemonWithJob();
  {
    v1::JobSpec spec = SpecOf({{"name", "flood"}, {"world", "2"}});
    AddParameters(spec, kParameters);
    for (v1::Parameter& parameter : *spec.mutable_tree()->mutable_modules(0)->mutable_parameters()) {
      parameter.set_requires_grad(true);
    }
    RawClient speaker(socket());
    RawClient silent(socket());
    ASSERT_TRUE(speaker.Enter(spec, 0).ok());
    ASSERT_TRUE(silent.Enter(spec, 1).ok());
    speaker.Send(Record(Opcode::kCommitParameters));
    silent.Send(Record(Opcode::kCommitParameters));
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("flood", "parameters", "version 1"); }));
    const uint64_t executed = Executed();
    uint64_t words = 0;
    v1::SessionRequest request;
    const auto send = [&] {
      words += static_cast<uint64_t>(request.commands().commands_size());
      ASSERT_TRUE(speaker.stream().Write(request));
      request.Clear();
    };
    for (size_t i = 0; i < speaker.plan().params.size(); ++i) {  // rank 1 has none of them: its parts are zeroed
      if (speaker.plan().params[i].requires_grad) {
        v1::SetGradientPresence& word = *request.mutable_commands()->add_commands()->mutable_set_gradient_presence();
        word.set_param(static_cast<int>(i));
        word.set_present(true);
      }
      if (request.commands().commands_size() == kMostInABatch) {
        ASSERT_NO_FATAL_FAILURE(send());
      }
    }
    ASSERT_NO_FATAL_FAILURE(send());
    ASSERT_GE(words, static_cast<uint64_t>(kParameters));
    ASSERT_TRUE(testing::PollUntil([&] { return Executed() == executed + words; }));
    SendStep(speaker, GoodStep());
    SendStep(silent, GoodStep());
    ExpectServesOthers();
    EXPECT_TRUE(testing::PollUntil([this] { return Job("flood").committed_step() == 1; }));
  }
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
