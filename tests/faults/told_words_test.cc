// Sessions whose words are told, by clients that keep no rule: they may read slowly, or not at all, and change their
// minds.

#include <algorithm>
#include <cstdint>
#include <optional>

#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

namespace shardd::faults {
namespace {

class ToldWords : public BadInput {
 protected:
  void SetUp() override {
    StartDaemonWithJob();
    ASSERT_TRUE(client_.emplace(socket()).Enter(SpecOf(job_), 0).ok());
    stream_ = &client_->stream();
  }
  void Tell() {
    v1::SessionRequest request;
    request.mutable_tell_words();
    ASSERT_TRUE(stream_->Write(request));
  }
  void UnshardAndReshard() {
    v1::SessionRequest request;
    v1::Unshard& unshard = *request.mutable_commands()->add_commands()->mutable_unshard();
    unshard.set_group(1);
    unshard.set_phase(v1::PHASE_FORWARD);
    request.mutable_commands()->add_commands()->mutable_reshard()->set_group(1);
    ASSERT_TRUE(stream_->Write(request));
  }
  // Reads until so many commands are executed, or the stream ends. Returns how many events of words it took.
  int ReadUntil(uint64_t consumed) {
    int events = 0;
    uint64_t last = 0;
    while (last < consumed) {
      const v1::SessionEvent event = stream_->Read();
      if (event.kind_case() == v1::SessionEvent::KIND_NOT_SET) break;
      if (!event.has_words()) continue;
      ++events;
      EXPECT_TRUE(event.words().consumed() == 0 || event.words().consumed() > last) << event.ShortDebugString();
      last = std::max(last, event.words().consumed());
    }
    EXPECT_EQ(last, consumed);
    return events;
  }

  std::optional<RawClient> client_;
  RawStream* stream_ = nullptr;
};

TEST_F(ToldWords, WhoeverReadsLateHearsTheLastNumbersInFewerEvents) {
  constexpr int kBatches = 2'000;
  ASSERT_NO_FATAL_FAILURE(Tell());
  for (int i = 0; i < kBatches; ++i) ASSERT_NO_FATAL_FAILURE(UnshardAndReshard());
  EXPECT_LE(ReadUntil(2 * kBatches), kBatches + 1) << "the commands of a batch are one event";
  client_.reset();
  ExpectJobIntact();
}

TEST_F(ToldWords, NothingIsReadFromTheRing) {
  ASSERT_NO_FATAL_FAILURE(Tell());
  EXPECT_GT(stream_->Read().words().version(), 0u);  // from here on
  client_->Send(Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD));
  ASSERT_NO_FATAL_FAILURE(UnshardAndReshard());
  ReadUntil(2);
  EXPECT_FALSE(client_->HasConsumed());
  client_.reset();
  ExpectJobIntact();
}

TEST_F(ToldWords, AreNotToldToWhomeverHasSentACommand) {
  ASSERT_NO_FATAL_FAILURE(UnshardAndReshard());
  ASSERT_NO_FATAL_FAILURE(Tell());
  ExpectStatus(stream_->End(), absl::StatusCode::kFailedPrecondition,
               "TellWords comes before the first command (got 2 commands, want 0)");
  client_.reset();
  ExpectJobIntact();
}

TEST_F(ToldWords, ValuesOfAnotherSizeThanTheElementsEndTheEpoch) {
  ASSERT_NO_FATAL_FAILURE(Tell());
  SendOnStream(*client_, [](v1::Command& command) { command.mutable_enter_full_params()->set_writeback(true); });
  SendOnStream(*client_, [](v1::Command& command) {
    command.mutable_write_parameters()->set_numel(1);
    command.mutable_write_parameters()->set_values("abc");
  });
  ExpectStatus(stream_->End(), absl::StatusCode::kInvalidArgument, "values have the wrong size (got 3, want 4 bytes)");
  client_.reset();
  ExpectJobIntact();
}

TEST_F(ToldWords, NobodyWritesFromAStagingAreaThatIsNotShared) {
  ASSERT_NO_FATAL_FAILURE(Tell());
  SendOnStream(*client_, [](v1::Command& command) { command.mutable_enter_full_params()->set_writeback(true); });
  SendOnStream(*client_, [this](v1::Command& command) {
    command.mutable_write_parameters()->set_numel(1);
    command.mutable_write_parameters()->set_staging_offset_bytes(client_->layout().payload_offset_bytes);
  });
  ExpectStatus(stream_->End(), absl::StatusCode::kInvalidArgument, "values have the wrong size (got 0, want 4 bytes)");
  client_.reset();
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
