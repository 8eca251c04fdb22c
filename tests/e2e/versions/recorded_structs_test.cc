// Structures that processes of different builds share, as releases have written them: this build reads the same.

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/shm/fd_channel_internal.h"
#include "common/shm/page.h"
#include "common/shm/ring.h"
#include "common/shm/session_view.h"
#include "common/shm/sum_ring.h"
#include "common/shm/trace_ring.h"
#include "common/tensor/update_log.h"
#include "server/custodian/wire.h"
#include "tests/e2e/versions/records.h"

namespace shardd::e2e {
namespace {

// A member: where it lies, and what its bytes say.
struct Member {
  std::string name;
  size_t offset_bytes;
  size_t size_bytes;
  bool is_text;
};

struct Shape {
  size_t size_bytes;
  std::vector<Member> members;

  std::string Make() const {
    std::string bytes(size_bytes, '\0');
    for (size_t i = 0; i < members.size(); ++i) {
      for (size_t k = 0; k < members[i].size_bytes; ++k) {
        bytes[members[i].offset_bytes + k] =
            static_cast<char>(members[i].is_text ? 'a' + (i + k) % 26 : 1 + (i * 8 + k) % 250);
      }
    }
    return bytes;
  }
  std::string Describe(const std::string& bytes) const {
    return absl::StrJoin(members, " ", [&](std::string* out, const Member& member) {
      const std::string value = bytes.substr(member.offset_bytes, member.size_bytes);
      absl::StrAppend(out, member.name, "=", member.is_text ? value : absl::BytesToHexString(value));
    });
  }
};

template <typename T>
Member MemberOf(const char* name, size_t offset_bytes) {
  return {name, offset_bytes, sizeof(T), std::is_same_v<std::remove_all_extents_t<T>, char>};
}
#define MEMBER(type, member) MemberOf<decltype(type::member)>(#member, offsetof(type, member))

std::map<std::string, Shape> Shapes() {
  using shm_internal::ReplyWire;
  using shm_internal::RequestWire;
  return {
      {"CommandRecord",
       {sizeof(CommandRecord),
        {MEMBER(CommandRecord, sequence), MEMBER(CommandRecord, opcode), MEMBER(CommandRecord, flags),
         MEMBER(CommandRecord, group), MEMBER(CommandRecord, arg0), MEMBER(CommandRecord, arg1),
         MEMBER(CommandRecord, arg2), MEMBER(CommandRecord, done)}}},
      {"TraceRecord",
       {sizeof(TraceRecord),
        {MEMBER(TraceRecord, begin_ns), MEMBER(TraceRecord, end_ns), MEMBER(TraceRecord, step),
         MEMBER(TraceRecord, group), MEMBER(TraceRecord, call), MEMBER(TraceRecord, lost)}}},
      {"SumRecord",
       {sizeof(SumRecord),
        {MEMBER(SumRecord, sequence), MEMBER(SumRecord, kind), MEMBER(SumRecord, group), MEMBER(SumRecord, ranks),
         MEMBER(SumRecord, source_offset_bytes), MEMBER(SumRecord, dst_offset_bytes), MEMBER(SumRecord, numel),
         MEMBER(SumRecord, source_dtype), MEMBER(SumRecord, reduce_dtype), MEMBER(SumRecord, keep),
         MEMBER(SumRecord, scale), MEMBER(SumRecord, accumulate)}}},
      {"SumRing", {offsetof(SumRing, records), {MEMBER(SumRing, written), MEMBER(SumRing, sessions)}}},
      {"SumWords",
       {sizeof(SumWords),
        {MEMBER(SumWords, summed), MEMBER(SumWords, waiting), MEMBER(SumWords, ended), MEMBER(SumWords, error)}}},
      {"ClientPage",
       {sizeof(ClientPage),
        {MEMBER(ClientPage, magic), MEMBER(ClientPage, submitted), MEMBER(ClientPage, done),
         MEMBER(ClientPage, is_void), MEMBER(ClientPage, waiting), MEMBER(ClientPage, reserved_word),
         MEMBER(ClientPage, trace_written)}}},
      {"DaemonPage",
       {static_cast<size_t>(kDaemonPageTailOffset),
        {MEMBER(DaemonPage, magic), MEMBER(DaemonPage, protocol_version), MEMBER(DaemonPage, epoch),
         MEMBER(DaemonPage, tracing), MEMBER(DaemonPage, trace_taken), MEMBER(DaemonPage, version),
         MEMBER(DaemonPage, consumed), MEMBER(DaemonPage, full_params), MEMBER(DaemonPage, reduced),
         MEMBER(DaemonPage, reducing), MEMBER(DaemonPage, passes), MEMBER(DaemonPage, passes_issued),
         MEMBER(DaemonPage, hand_ins), MEMBER(DaemonPage, awake)}}},
      {"SlotEntry", {sizeof(SlotEntry), {MEMBER(SlotEntry, released), MEMBER(SlotEntry, issued)}}},
      {"GroupEntry",
       {sizeof(GroupEntry),
        {MEMBER(GroupEntry, unsharded), MEMBER(GroupEntry, pool_offset_bytes), MEMBER(GroupEntry, issued)}}},
      {"FdRequest",
       {sizeof(RequestWire),
        {MEMBER(RequestWire, magic), MEMBER(RequestWire, protocol_version), MEMBER(RequestWire, session_id),
         MEMBER(RequestWire, token), MEMBER(RequestWire, first_descriptor), MEMBER(RequestWire, descriptors)}}},
      {"FdReply",
       {sizeof(ReplyWire),
        {MEMBER(ReplyWire, magic), MEMBER(ReplyWire, code), MEMBER(ReplyWire, text_bytes),
         MEMBER(ReplyWire, descriptors)}}},
      {"CustodyMessage",
       {sizeof(CustodyMessage),
        {MEMBER(CustodyMessage, magic), MEMBER(CustodyMessage, version), MEMBER(CustodyMessage, op),
         MEMBER(CustodyMessage, code), MEMBER(CustodyMessage, newest), MEMBER(CustodyMessage, job),
         MEMBER(CustodyMessage, name), MEMBER(CustodyMessage, text)}}},
  };
}

#undef MEMBER

// Numbers that bytes mean something by.
std::map<std::string, int64_t> Constants() {
  std::map<std::string, int64_t> constants = {
      {"kRingRecords", kRingRecords},
      {"kTraceRecords", kTraceRecords},
      {"kTraceCallFailed", kTraceCallFailed},
      {"kSumRecords", kSumRecords},
      {"kMaxSumRanks", kMaxSumRanks},
      {"kTimelineSequenceBits", kTimelineSequenceBits},
      {"kHasPresent", kHasPresent},
      {"kHasFresh", kHasFresh},
      {"kLast", kLast},
      {"kWriteback", kWriteback},
      {"kStepped", kStepped},
      {"kRank0Only", kRank0Only},
      {"kWithGrads", kWithGrads},
      {"kNotRecurse", kNotRecurse},
      {"kOfGradient", kOfGradient},
      {"kWrittenStateShift", kWrittenStateShift},
      {"kUnshard", static_cast<int64_t>(Opcode::kUnshard)},
      {"kReshard", static_cast<int64_t>(Opcode::kReshard)},
      {"kSubmitGradients", static_cast<int64_t>(Opcode::kSubmitGradients)},
      {"kBackwardDone", static_cast<int64_t>(Opcode::kBackwardDone)},
      {"kStep", static_cast<int64_t>(Opcode::kStep)},
      {"kWriteParameters", static_cast<int64_t>(Opcode::kWriteParameters)},
      {"kCommitParameters", static_cast<int64_t>(Opcode::kCommitParameters)},
      {"kEnterFullParams", static_cast<int64_t>(Opcode::kEnterFullParams)},
      {"kLeaveFullParams", static_cast<int64_t>(Opcode::kLeaveFullParams)},
      {"kEnterPass", static_cast<int64_t>(Opcode::kEnterPass)},
      {"kWaitGradientSlot", static_cast<int64_t>(Opcode::kWaitGradientSlot)},
      {"kLeavePass", static_cast<int64_t>(Opcode::kLeavePass)},
      {"kHandIn", static_cast<int64_t>(Opcode::kHandIn)},
      {"kAbandonBackward", static_cast<int64_t>(Opcode::kAbandonBackward)},
      {"kSetGradientPresence", static_cast<int64_t>(Opcode::kSetGradientPresence)},
      {"kSum", static_cast<int64_t>(SumKind::kSum)},
      {"kCopy", static_cast<int64_t>(SumKind::kCopy)},
      {"kZero", static_cast<int64_t>(SumKind::kZero)},
      {"kFdSessionMemory", kFdSessionMemory},
      {"kFdDaemonPage", kFdDaemonPage},
      {"kFdDoorbell", kFdDoorbell},
      {"kFdShards", kFdShards},
      {"kFdParameters", kFdParameters},
      {"kFdPool", kFdPool},
      {"kFdGradients", kFdGradients},
      {"kFdOptimizer", kFdOptimizer},
      {"kFdGradientSlots", kFdGradientSlots},
      {"kFdFirstPeerSlots", kFdFirstPeerSlots},
      {"kOwn", static_cast<int64_t>(CustodyOp::kOwn)},
      {"kPut", static_cast<int64_t>(CustodyOp::kPut)},
      {"kDrop", static_cast<int64_t>(CustodyOp::kDrop)},
      {"kList", static_cast<int64_t>(CustodyOp::kList)},
      {"kAnswer", static_cast<int64_t>(CustodyOp::kAnswer)},
      {"kObject", static_cast<int64_t>(CustodyOp::kObject)},
      {"kEnd", static_cast<int64_t>(CustodyOp::kEnd)},
      {"UpdateLog::kBlockNumel", UpdateLog::kBlockNumel},
      {"UpdateLog::kArrays", 3},  // of jobs whose kinds all releases know
      {"sizeof(UpdateLog)", UpdateLog::SizeBytes(3)},
  };
  return constants;
}

std::string AllStructs() {
  std::string text;
  for (const auto& [name, shape] : Shapes()) {
    const std::string bytes = shape.Make();
    absl::StrAppend(&text, "struct ", name, " ", absl::BytesToHexString(bytes), "\nmeans ", shape.Describe(bytes),
                    "\n");
  }
  for (const auto& [name, value] : Constants()) absl::StrAppend(&text, "constant ", name, " ", value, "\n");
  return text;
}

class RecordedStructs : public ::testing::TestWithParam<std::string> {};

TEST_P(RecordedStructs, AreReadAsTheyWereMeant) {
  const std::map<std::string, Shape> shapes = Shapes();
  const std::map<std::string, int64_t> constants = Constants();
  int read = 0;
  std::string name, bytes;
  for (const Line& line : Lines(Recorded(GetParam(), "structs.txt", AllStructs))) {
    ++read;
    if (line.word(0) == "constant") {
      ASSERT_TRUE(constants.contains(line.word(1))) << line.word(1) << " is gone";
      EXPECT_EQ(constants.at(line.word(1)), line.number(2)) << line.word(1);
    } else if (line.word(0) == "struct") {
      name = line.word(1);
      bytes = line.bytes(2);
      ASSERT_TRUE(shapes.contains(name)) << name << " is gone";
      EXPECT_EQ(bytes.size(), shapes.at(name).size_bytes) << name;
    } else {
      // A member that a later version has added says zeros in bytes of before, and is not meant.
      const std::string got = " " + shapes.at(name).Describe(bytes + std::string(4096, '\0')) + " ";
      for (size_t i = 1; i < line.words.size(); ++i) {
        EXPECT_NE(got.find(" " + line.word(i) + " "), std::string::npos)
            << name << " has no " << line.word(i) << ", but" << got;
      }
    }
  }
  EXPECT_GT(read, 50);
}

INSTANTIATE_TEST_SUITE_P(Of, RecordedStructs, ::testing::ValuesIn(RecordedVersions()),
                         [](const auto& info) { return VersionName(info.param); });

}  // namespace
}  // namespace shardd::e2e
