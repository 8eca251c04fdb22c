#include "client/c/session/record_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

class RecordCommandTest : public ::testing::Test {
 protected:
  RecordCommandTest() {
    SpecBuilder builder(1);
    builder.Param(0, "w", {8}, {.dtype = v1::DTYPE_BFLOAT16});
    plan_ = builder.Plan();
    layout_ = MakeSessionLayout(plan_);
    memory_.resize(static_cast<size_t>(layout_.memory_bytes));
    view_ = SessionMemoryView(memory_.data(), layout_.ring_offset_bytes, layout_.masks_offset_bytes);
  }
  v1::Command Of(const CommandRecord& record) { return CommandOfRecord(record, plan_, layout_, view_); }
  static CommandRecord Record(Opcode opcode) {
    CommandRecord record = {};
    record.opcode = opcode;
    return record;
  }
  int64_t Put(const std::string& bytes) {
    std::memcpy(view_.At<char>(layout_.payload_offset_bytes), bytes.data(), bytes.size());
    return static_cast<int64_t>(bytes.size());
  }

  ShardPlan plan_;
  SessionLayout layout_;
  std::vector<char> memory_;
  SessionMemoryView view_;
};

TEST_F(RecordCommandTest, EveryRecordHasItsMessageAndEveryMessageItsRecord) {
  std::set<v1::Command::KindCase> kinds;
  int opcodes = 0;
  for (auto opcode = static_cast<uint32_t>(Opcode::kInvalid) + 1;
       opcode <= static_cast<uint32_t>(Opcode::kSetGradientPresence); ++opcode, ++opcodes) {
    kinds.insert(Of(Record(static_cast<Opcode>(opcode))).kind_case());
  }
  EXPECT_EQ(kinds.count(v1::Command::KIND_NOT_SET), 0u);
  EXPECT_EQ(static_cast<int>(kinds.size()), opcodes);
  EXPECT_EQ(v1::Command::descriptor()->oneof_decl(0)->field_count(), opcodes);
}

TEST_F(RecordCommandTest, MasksAndPayloadsTravelWithTheirRecord) {
  CommandRecord submit = Record(Opcode::kSubmitGradients);
  *view_.At<uint8_t>(layout_.mask_offset_bytes[0]) = 1;
  submit.flags = kHasPresent;
  EXPECT_EQ(Of(submit).submit_gradients().present(), std::string("\1"));
  EXPECT_EQ(Of(submit).submit_gradients().fresh(), "");
  submit.flags = kHasFresh;
  EXPECT_EQ(Of(submit).submit_gradients().fresh(), std::string("\0", 1));
  v1::Step step;
  step.set_trainer_state("state");
  step.add_groups()->set_lr(0.5);
  CommandRecord stepped = Record(Opcode::kStep);
  stepped.arg0 = Put(step.SerializeAsString());
  EXPECT_EQ(Of(stepped).step().SerializeAsString(), step.SerializeAsString());
  CommandRecord enter = Record(Opcode::kEnterPass);
  enter.flags = kStepped;
  enter.arg0 = Put("of a pass");
  EXPECT_EQ(Of(enter).enter_pass().trainer_state(), "of a pass");
  EXPECT_TRUE(Of(enter).enter_pass().stepped());
}

TEST_F(RecordCommandTest, StagedElementsTravelInTheirOwnDtype) {
  Put("abcdefghijklmnop");
  CommandRecord write = Record(Opcode::kWriteParameters);
  write.arg0 = 3;
  write.arg1 = 2;
  write.arg2 = layout_.payload_offset_bytes;
  EXPECT_EQ(Of(write).write_parameters().values(), "abcd") << "bf16";
  EXPECT_EQ(Of(write).write_parameters().first_element(), 3);
  EXPECT_EQ(Of(write).write_parameters().staging_offset_bytes(), 0);
  write.flags = kOfGradient;
  EXPECT_EQ(Of(write).write_parameters().values(), "abcdefgh") << "gradients are fp32";
  write.flags = uint32_t{2} << kWrittenStateShift;
  EXPECT_EQ(Of(write).write_parameters().values(), "abcdefgh") << "and so are states";
  EXPECT_EQ(Of(write).write_parameters().optimizer_state(), 2);
  write.flags = ~uint32_t{0} << kWrittenStateShift;
  write.arg1 = write.arg2 = 0;
  EXPECT_EQ(Of(write).write_parameters().optimizer_state(), -1);
  EXPECT_EQ(Of(write).write_parameters().values(), "");
}

TEST_F(RecordCommandTest, FlagsAndNumbersAreKept) {
  CommandRecord unshard = Record(Opcode::kUnshard);
  unshard.arg0 = v1::PHASE_BACKWARD;
  EXPECT_EQ(Of(unshard).unshard().phase(), v1::PHASE_BACKWARD);
  CommandRecord enter = Record(Opcode::kEnterFullParams);
  enter.group = -1;
  enter.flags = kWriteback | kWithGrads;
  EXPECT_EQ(Of(enter).enter_full_params().ShortDebugString(), "writeback: true with_grads: true");
  enter.group = 0;
  enter.flags = kRank0Only | kNotRecurse;
  EXPECT_EQ(Of(enter).enter_full_params().ShortDebugString(), "rank0_only: true scope: 1 not_recurse: true");
  enter.group = -1;
  enter.flags = kWriteback | kEdits;
  EXPECT_EQ(Of(enter).enter_full_params().ShortDebugString(), "writeback: true of_edits: true");
  CommandRecord pass = Record(Opcode::kEnterPass);
  pass.flags = kEdits;
  EXPECT_EQ(Of(pass).enter_pass().ShortDebugString(), "has_edits: true");
  CommandRecord submit = Record(Opcode::kSubmitGradients);
  submit.flags = kAsksForOthers;
  EXPECT_EQ(Of(submit).submit_gradients().ShortDebugString(), "asks_for_others: true");
  CommandRecord done = Record(Opcode::kBackwardDone);
  done.arg0 = 4;
  done.flags = kLast;
  EXPECT_EQ(Of(done).backward_done().ShortDebugString(), "index: 4 last: true");
  CommandRecord presence = Record(Opcode::kSetGradientPresence);
  presence.group = 2;
  presence.arg0 = 1;
  EXPECT_EQ(Of(presence).set_gradient_presence().ShortDebugString(), "param: 2 present: true");
}

}  // namespace
}  // namespace shardd
