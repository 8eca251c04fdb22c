// Clients that send faster than they are served.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/plan/session_layout.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

constexpr int64_t kNumel = kMiB / 4;  // of one write: 1 MiB, as much as is staged at once

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
  static v1::SessionRequest Writes(const RawClient& client, int count, int64_t numel = kNumel) {
    v1::SessionRequest request;
    for (int i = 0; i < count; ++i) {
      v1::WriteParameters& write = *request.mutable_commands()->add_commands()->mutable_write_parameters();
      write.set_numel(numel);
      write.set_staging_offset_bytes(client.layout().payload_offset_bytes);
    }
    return request;
  }
  uint64_t Executed() { return Ranks("flood")[0].commands(); }
};

// Batches that take several times as long to execute as to receive, from a client that reads no event: they wait in
// the client, not in the daemon, and others are served.
TEST_F(Flood, OfCommandsWaitsInTheClient) {
  constexpr int kWrites = 1024;
  constexpr int kOfNothing = 12'000;  // commands that take memory and no time: a batch is 3 MiB when it is decoded
  // AddressSanitizer keeps 256 MiB of freed memory: enough more batches have to come that a backlog would show.
  constexpr int kLeastBatches = testing::kSanitized ? 256 : 40;
  // A few batches in several shapes (on the way, decoded, being executed), where all of them would be twice as much or
  // more.
  constexpr int64_t kMostBytes = (testing::kSanitized ? 768 : 64) * kMiB;
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAsWriter(client));
    v1::SessionRequest request = Writes(client, kWrites);
    const uint64_t executed = Executed();
    ASSERT_TRUE(client.stream().Write(request));  // old values are kept from now on: they are no backlog
    ASSERT_TRUE(testing::PollUntil([&] { return Executed() == executed + kWrites; }));
    const int64_t before = ResidentBytes();
    request.MergeFrom(Writes(client, kOfNothing, 0));

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

// A batch is as long as its client likes; whoever comes meanwhile is served before it has been executed.
TEST_F(Flood, InOneBatchHoldsUpNobody) {
  constexpr int kWrites = 14'000;  // about as many as a message may have
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_NO_FATAL_FAILURE(EnterAsWriter(client));
    const uint64_t executed = Executed();
    ASSERT_TRUE(client.stream().Write(Writes(client, kWrites)));
    ASSERT_TRUE(testing::PollUntil([&] { return Executed() > executed; }));
    ExpectServesOthers();
    EXPECT_LT(Executed(), executed + kWrites);
  }
  ExpectJobIntact();
}

// Steps that are nothing but unknown fields, of all ranks of a small job at once: none is parsed, none is kept.
TEST_F(Flood, OfUnknownFieldsInStepsIsRefusedUnparsed) {
  constexpr int kRanks = 16;
  constexpr int64_t kMostBytes = 64 * kMiB;  // kept, they are 13 MiB each
  StartDaemonWithJob();
  {
    const v1::JobSpec spec = SpecOf({{"name", "flood"}, {"world", absl::StrCat(kRanks)}});
    std::vector<std::unique_ptr<RawClient>> clients;
    for (int rank = 0; rank < kRanks; ++rank) {
      clients.push_back(std::make_unique<RawClient>(socket()));
      ASSERT_TRUE(clients.back()->Enter(spec, rank).ok());
      clients.back()->Send(Record(Opcode::kCommitParameters));
    }
    ASSERT_TRUE(testing::PollUntil([this] { return HasEvent("flood", "parameters", "version 1"); }));
    std::string bytes = GoodStep().SerializeAsString();
    while (bytes.size() + 2 <= static_cast<size_t>(kStepPayloadBytes)) bytes.append("\x78\x01");
    const int64_t before = ResidentBytes();
    for (const auto& client : clients) {
      std::memcpy(client->payload(), bytes.data(), bytes.size());
      client->Send(Record(Opcode::kStep, 0, static_cast<int64_t>(bytes.size())));
    }
    ExpectServesOthers();
    EXPECT_LT(ResidentBytes() - before, kMostBytes);
    ExpectStatus(clients[0]->stream().End(), absl::StatusCode::kInvalidArgument, "unknown field (number 15)");
  }
  ExpectJobIntact();
}

// What is said of each parameter of one large group is settled at the step, on the daemon's loop.
TEST_F(Flood, OfPresenceForALargeGroupHoldsUpNobody) {
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
    for (size_t i = 0; i < speaker.plan().params.size(); ++i) {  // rank 1 has none of them: its parts are zeroed
      if (speaker.plan().params[i].requires_grad) {
        v1::SetGradientPresence& word = *request.mutable_commands()->add_commands()->mutable_set_gradient_presence();
        word.set_param(static_cast<int>(i));
        word.set_present(true);
        ++words;
      }
      if (request.commands().commands_size() == 10'000 || i + 1 == speaker.plan().params.size()) {
        ASSERT_TRUE(speaker.stream().Write(request));
        request.Clear();
      }
    }
    ASSERT_GE(words, static_cast<uint64_t>(kParameters));
    ASSERT_TRUE(testing::PollUntil([&] { return Executed() == executed + words; }));
    SendStep(speaker, GoodStep());
    SendStep(silent, GoodStep());
    ExpectServesOthers();
    EXPECT_TRUE(testing::PollUntil([this] { return Job("flood").committed_step() == 1; }));
  }
  ExpectJobIntact();
}

// protobuf complains to the log of each.
TEST_F(Flood, OfTextsThatAreNoUtf8FillsNoLog) {
  constexpr int kCalls = 10'000;  // without a limit they are megabytes
  constexpr uintmax_t kMostLogBytes = 256 << 10;
  StartDaemonWithJob();
  {
    v1::OpenJobRequest open;
    *open.mutable_spec() = SpecOf({{"name", "no-text"}, {"world", "1"}});
    v1::JobRef ref;
    ref.set_job("no-text");
    RawClient client(socket());
    for (const auto& [method, bytes] :
         {std::pair<std::string, std::string>{"/shardd.v1.TrainerService/OpenJob", open.SerializeAsString()},
          {"/shardd.v1.JobsService/ListRanks", ref.SerializeAsString()}}) {
      const std::string no_text = absl::StrReplaceAll(bytes, {{"no-text", "\xff\xfe\xc0\x80\xed\xa0\x80"}});
      ASSERT_NE(no_text, bytes);
      for (int i = 0; i < kCalls / 2; ++i) ASSERT_FALSE(client.Call(method, no_text).ok());
    }
    EXPECT_TRUE(absl::StrContains(testing::ReadWholeFile(DaemonLog()), "UTF-8"));
    EXPECT_LT(std::filesystem::file_size(DaemonLog()), kMostLogBytes);
  }
  ExpectJobIntact();
}

// So that it is not parsed for each step, and nobody complains of it.
TEST_F(Flood, OfTextsHasNoPlaceInSessions) {
  std::vector<const google::protobuf::Descriptor*> messages = {v1::SessionRequest::descriptor(),
                                                               v1::Step::descriptor()};
  for (size_t i = 0; i < messages.size(); ++i) {
    for (int k = 0; k < messages[i]->field_count(); ++k) {
      const google::protobuf::FieldDescriptor& field = *messages[i]->field(k);
      EXPECT_NE(field.type(), google::protobuf::FieldDescriptor::TYPE_STRING) << field.full_name();
      const google::protobuf::Descriptor* const inner = field.message_type();
      if (inner != nullptr && std::find(messages.begin(), messages.end(), inner) == messages.end()) {
        messages.push_back(inner);
      }
    }
  }
  EXPECT_GT(messages.size(), 10u);
}

}  // namespace
}  // namespace shardd::faults
