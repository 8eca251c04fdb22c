// A session that misuses its ring, its payload, its stream or the protocol.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/plan/session_layout.h"
#include "google/protobuf/unknown_field_set.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"

namespace shardd::faults {
namespace {

using testing::PollUntil;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

struct Misuse {
  const char* name;
  std::function<void(RawClient&)> act;
  absl::StatusCode code;
  const char* text;
};
std::ostream& operator<<(std::ostream& out, const Misuse& misuse) { return out << misuse.name; }

// As many times as a step's payload has room for.
std::string Repeated(absl::string_view text) {
  std::string all;
  while (static_cast<int64_t>(all.size() + text.size()) <= kStepPayloadBytes) absl::StrAppend(&all, text);
  return all;
}
void SendPayload(RawClient& client, const std::string& bytes) {
  std::memcpy(client.payload(), bytes.data(), bytes.size());
  client.Send(Record(Opcode::kStep, 0, static_cast<int64_t>(bytes.size())));
}

class HostileSession : public BadInput, public ::testing::WithParamInterface<Misuse> {};

TEST_P(HostileSession, EndsItsOwnStepAndNothingElse) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    GetParam().act(client);
    ExpectStatus(client.stream().End(), GetParam().code, GetParam().text);
  }
  ExpectJobIntact();
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

INSTANTIATE_TEST_SUITE_P(
    Ring, HostileSession,
    ::testing::Values(
        Misuse{"WrongSequence", [](auto& c) { c.Send(Record(Opcode::kUnshard, 0, 1), 7); }, kInvalid, "sequence"},
        Misuse{"UnknownOpcode", [](auto& c) { c.Send(Record(static_cast<Opcode>(12345))); }, kInvalid, "12345"},
        Misuse{"NoOpcode", [](auto& c) { c.Send(Record(Opcode::kInvalid)); }, kInvalid, "opcode"},
        Misuse{"GroupBeyondTheLast", [](auto& c) { c.Send(Record(Opcode::kUnshard, 4, 1)); }, kInvalid, "got 4"},
        Misuse{"GroupNegative", [](auto& c) { c.Send(Record(Opcode::kReshard, -1)); }, kInvalid, "got -1"},
        Misuse{"GroupHugeInSubmit", [](auto& c) { c.Send(Record(Opcode::kSubmitGradients, 1 << 30)); }, kInvalid,
               "no such group"},
        Misuse{"GroupHugeInWait", [](auto& c) { c.Send(Record(Opcode::kWaitGradientSlot, 1 << 30)); }, kInvalid,
               "no such group"},
        Misuse{"SubmittedJumps", [](auto& c) { c.Announce(TimelineValue(c.session().epoch(), uint64_t{1} << 39)); },
               kInvalid, "out of range"},
        Misuse{"SubmittedOneBeyondTheRing",
               [](auto& c) { c.Announce(TimelineValue(c.session().epoch(), kRingRecords + 1)); }, kInvalid,
               "out of range"},
        Misuse{"SubmittedGoesBack",
               [](auto& c) {
                 for (int i = 0; i < 3; ++i) c.Send(Record(Opcode::kUnshard, 0, 1));
                 ASSERT_TRUE(c.Consumed());
                 c.Announce(TimelineValue(c.session().epoch(), 1));
               },
               kInvalid, "out of range"},
        Misuse{"EnterPass", [](auto& c) { c.Send(Record(Opcode::kEnterPass)); }, kPrecondition, "trainers never write"},
        Misuse{"LeavePass", [](auto& c) { c.Send(Record(Opcode::kLeavePass)); }, kPrecondition, "trainers never write"},
        Misuse{"HandIn", [](auto& c) { c.Send(Record(Opcode::kHandIn)); }, kPrecondition, "trainers never write"}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Payload, HostileSession,
    ::testing::Values(
        Misuse{"StepLengthNegative", [](auto& c) { c.Send(Record(Opcode::kStep, 0, -1)); }, kInvalid, "payload"},
        Misuse{"StepLengthLeast",
               [](auto& c) { c.Send(Record(Opcode::kStep, 0, std::numeric_limits<int64_t>::min())); }, kInvalid,
               "payload"},
        Misuse{"StepLengthHuge", [](auto& c) { c.Send(Record(Opcode::kStep, 0, kMost)); }, kInvalid, "payload"},
        Misuse{"StepOfNoise",
               [](auto& c) {
                 std::memset(c.payload(), 0xff, 64);
                 c.Send(Record(Opcode::kStep, 0, 64));
               },
               kInvalid, "not a shardd.v1.Step"},
        // 37 ms of the daemon's loop and 13 MiB each, were they parsed.
        Misuse{"StepOfUnknownFields", [](auto& c) { SendPayload(c, Repeated("\x78\x01")); }, kInvalid,
               "unknown field (number 15)"},
        Misuse{"StepOfUnknownFieldsInAGroup", [](auto& c) { SendPayload(c, "\x0a\x03\xa0\x06\x01"); }, kInvalid,
               "unknown field (number 100)"},
        Misuse{"StepOfEmptyGroups", [](auto& c) { SendPayload(c, Repeated(absl::string_view("\x0a\0", 2))); }, kInvalid,
               "too many fields"},
        Misuse{"StepOfOneFieldAgainAndAgain", [](auto& c) { SendPayload(c, Repeated(absl::string_view("\x1a\0", 2))); },
               kInvalid, "too many fields"},
        Misuse{"StepOnTheStreamWithAnUnknownField",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   v1::Step& step = *command.mutable_step() = GoodStep();
                   step.GetReflection()->MutableUnknownFields(&step)->AddVarint(1000, 1);
                 });
               },
               kInvalid, "unknown field (number 1000)"},
        Misuse{"StepOnTheStreamOfEmptyGroups",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   for (int i = 0; i < 10'000; ++i) command.mutable_step()->add_groups();
                 });
               },
               kInvalid, "optimizer groups are too many"},
        Misuse{"StepWithTooMuchTrainerState",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.set_trainer_state(std::string(kMaxTrainerStateBytes + 1, 'x'));
                 SendStep(c, step);
               },
               kInvalid, "trainer state is too large"},
        Misuse{"StepOnTheStreamWithTooMuchTrainerState",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   *command.mutable_step() = GoodStep();
                   command.mutable_step()->set_trainer_state(std::string(kMaxTrainerStateBytes + 1, 'x'));
                 });
               },
               kInvalid, "trainer state is too large"},
        Misuse{"StepWithoutOptimizerGroups", [](auto& c) { SendStep(c, v1::Step()); }, kInvalid, "optimizer groups"},
        Misuse{"StepWithALearningRateThatIsNoNumber",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.mutable_groups(0)->set_lr(std::nan(""));
                 SendStep(c, step);
               },
               kInvalid, "lr"},
        Misuse{"StepWithANegativeNormLimit",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.set_max_grad_norm(-1);
                 SendStep(c, step);
               },
               kInvalid, "max_grad_norm"},
        Misuse{"StepWithAnOpenGroup",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD));
                 SendStep(c, GoodStep());
               },
               kPrecondition, "\"embed\""},
        Misuse{"StepWithAnOpenBackward",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD));
                 c.Send(Record(Opcode::kSubmitGradients, 1));
                 c.Send(Record(Opcode::kReshard, 1));
                 SendStep(c, GoodStep());
               },
               kPrecondition, "BackwardDone"}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Protocol, HostileSession,
    ::testing::Values(
        Misuse{"UnknownPhase", [](auto& c) { c.Send(Record(Opcode::kUnshard, 0, 77)); }, kInvalid, "phase"},
        Misuse{"ReshardOfWhatIsSharded", [](auto& c) { c.Send(Record(Opcode::kReshard, 2)); }, kPrecondition,
               "\"mid\""},
        Misuse{"GradientsOutsideAPass", [](auto& c) { c.Send(Record(Opcode::kSubmitGradients, 2)); }, kPrecondition,
               "\"mid\""},
        Misuse{"GradientOfAFrozenParameter",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 2, v1::PHASE_FORWARD));
                 std::memset(c.memory().template At<char>(c.layout().mask_offset_bytes[2]), 0xff, 1);
                 c.Send(Record(Opcode::kSubmitGradients, 2, 0, 0, 0, kHasPresent));
               },
               kInvalid, "\"mid.frozen\" is frozen"},
        Misuse{"MaskOfTheWrongSizeOnTheStream",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   command.mutable_submit_gradients()->set_group(2);
                   command.mutable_submit_gradients()->set_present(std::string(5000, '\xff'));
                 });
               },
               kInvalid, "mask has the wrong size"},
        Misuse{"CommandOfNoKind", [](auto& c) { SendOnStream(c, [](v1::Command&) {}); }, kInvalid, "kind"},
        Misuse{"BackwardsOutOfOrder", [](auto& c) { c.Send(Record(Opcode::kBackwardDone, 0, 3)); }, kPrecondition,
               "wrong index (got 3, want 0)"},
        Misuse{"WriteOfTrainedParameters", [](auto& c) { c.Send(Record(Opcode::kWriteParameters, 0, 0, 1)); },
               kPrecondition, "before version 1"},
        Misuse{"WriteOfAnUnknownParameter", [](auto& c) { c.Send(Record(Opcode::kWriteParameters, -1, 0, 1)); },
               kInvalid, "no such parameter"},
        Misuse{"CommitOfNothing", [](auto& c) { c.Send(Record(Opcode::kCommitParameters)); }, kPrecondition,
               "CommitParameters"},
        Misuse{"LeaveWithoutEnter", [](auto& c) { c.Send(Record(Opcode::kLeaveFullParams)); }, kPrecondition,
               "not inside"},
        Misuse{"EnterTwice",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams));
                 c.Send(Record(Opcode::kEnterFullParams));
               },
               kPrecondition, "inside already"},
        Misuse{"WritebackOutsideOfTheParameter",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 c.Send(Record(Opcode::kWriteParameters, 0, kMost, kMost));
               },
               kInvalid, "out of range"},
        Misuse{"WritebackFromOutsideOfTheMemory",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 c.Send(Record(Opcode::kWriteParameters, 0, 0, 3, int64_t{1} << 40));
               },
               kInvalid, "staging"},
        Misuse{"WritebackThatIsNeverCommitted",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 std::memset(c.payload(), 0x41, 64);
                 c.Send(Record(Opcode::kWriteParameters, 0, 0, 3, c.layout().payload_offset_bytes));
                 c.Send(Record(Opcode::kUnshard, 9));
               },
               kInvalid, "no such group"},
        Misuse{"FullParametersOfAnUnknownGroup", [](auto& c) { c.Send(Record(Opcode::kEnterFullParams, 1 << 30)); },
               kInvalid, "no such group"},
        Misuse{"FullParametersOfNoModule",
               [](auto& c) { c.Send(Record(Opcode::kEnterFullParams, -1, 0, 0, 0, kNotRecurse)); }, kInvalid,
               "recurse false names no module"},
        Misuse{"WritebackOfAGradientThatWasNotAskedFor",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 c.Send(Record(Opcode::kWriteParameters, 0, 0, 1, c.layout().payload_offset_bytes, kOfGradient));
               },
               kPrecondition, "with_grads"},
        Misuse{"AbandonInsideFullParameters",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams));
                 c.Send(Record(Opcode::kAbandonBackward));
               },
               kPrecondition, "Abandon"},
        Misuse{"PresenceOfAnUnknownParameter", [](auto& c) { c.Send(Record(Opcode::kSetGradientPresence, -1, 1)); },
               kInvalid, "no such parameter"},
        Misuse{"SecondHello", [](auto& c) { c.stream().Hello(c.session().session_id(), c.session().token()); },
               kInvalid, "second hello"},
        Misuse{"MessageOfNoKind", [](auto& c) { (void)c.stream().Write(v1::SessionRequest()); }, kInvalid,
               "no known kind"}),
    [](const auto& info) { return info.param.name; });

TEST_F(BadInput, WordsOfAnotherEpochAreNotRead) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    for (const uint64_t epoch : {client.session().epoch() - 1, client.session().epoch() + 1, uint64_t{0xffffff}}) {
      client.Announce(TimelineValue(epoch, 5));
    }
    EXPECT_TRUE(DaemonAlive());
    EXPECT_EQ(Ranks()[0].commands(), 0);
    EXPECT_EQ(Ranks()[0].state(), v1::RANK_STATE_IDLE);
  }
  ExpectJobIntact();
}

// A trace is what trainers say of themselves: what is impossible is counted and left out, and nothing else suffers.
TEST_F(BadInput, MeasurementsThatCannotBeAreLeftOutOfATrace) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    EXPECT_EQ(client.daemon_page().tracing.load(), 0u);
    grpc::ClientContext context;
    v1::TraceJobRequest request;
    request.set_job("job");
    request.set_timeout_ms(1000);
    const auto reader = client.jobs().TraceJob(&context, request);
    v1::TraceJobResponse message;
    ASSERT_TRUE(reader->Read(&message));
    EXPECT_TRUE(PollUntil([&] { return client.daemon_page().tracing.load() != 0; }));
    const int64_t now_ns = TraceNowNs();
    const int64_t hour_ns = int64_t{3600} * 1'000'000'000;
    const TraceRecord records[] = {{now_ns, now_ns, 6, 0, v1::TRACE_CALL_RESHARD, 0},  // the only one that can be
                                   {now_ns - hour_ns, now_ns, 6, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns - 1, 6, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns + hour_ns, 6, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, -1, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, INT64_MAX, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, INT64_MAX - 1, 0, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, 8, 0, v1::TRACE_CALL_RESHARD, 0},  // 5 are committed
                                   {now_ns, now_ns, 6, 4, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, 6, -2, v1::TRACE_CALL_RESHARD, 0},
                                   {now_ns, now_ns, 6, 0, 0, 0},
                                   {now_ns, now_ns, 6, 0, 60000, 0},
                                   {now_ns, now_ns, 6, 0, kTraceCallFailed, 0},
                                   {INT64_MIN, INT64_MAX, INT64_MIN, INT32_MIN, 65535, 65535}};
    auto* ring = client.memory().At<TraceRecord>(client.layout().trace_offset_bytes);
    std::copy(std::begin(records), std::end(records), ring);
    std::atomic<uint64_t>& written = client.memory().page().trace_written;
    written.store(std::size(records));
    EXPECT_TRUE(PollUntil([&] { return client.daemon_page().trace_taken.load() == std::size(records); }));
    written.store(UINT64_MAX);  // and then nothing is taken from it any more
    int calls = 0;
    while (reader->Read(&message)) {
      for (const v1::TraceSpan& span : message.spans().spans()) calls += span.kind() == v1::TRACE_KIND_CALL ? 1 : 0;
    }
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(message.end().refused_records(), 14);
    EXPECT_EQ(message.end().lost_spans(), 0);
    EXPECT_EQ(client.daemon_page().tracing.load(), 0u);
    EXPECT_LE(message.end().last_step(), 5);
    EXPECT_EQ(Ranks()[0].session_id(), client.session().session_id());
  }
  ExpectJobIntact();
}

TEST_F(BadInput, NobodyMeasuresWhenTheLastReaderHasGone) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    grpc::ClientContext context;
    v1::TraceJobRequest request;
    request.set_job("job");
    const auto reader = client.jobs().TraceJob(&context, request);
    EXPECT_TRUE(PollUntil([&] { return client.daemon_page().tracing.load() != 0; }));
    context.TryCancel();
    EXPECT_TRUE(PollUntil([&] { return client.daemon_page().tracing.load() == 0; }));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
