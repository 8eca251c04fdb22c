// A client of a release is served by this build's daemon: its bytes open a job, attach, and train a step.

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/fd_channel_internal.h"
#include "common/shm/session_view.h"
#include "shardd/v1/trainer.pb.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/versions/replayed_session.h"

namespace shardd::e2e {
namespace {

// What a client of this build writes, as lines for ReplayedSession.
class SessionText {
 public:
  SessionText() : plan_(*PlanShards(spec_)), layout_(MakeSessionLayout(plan_)) {}

  int64_t shards_bytes() const { return plan_.memory.shards_bytes; }
  std::string All() {
    Enter();
    InitialValues();
    Step();
    Line("shards");  // which bytes is seen when it is replayed
    return text_;
  }

 private:
  static constexpr char kNumber = 'n';  // in the place of the job's and the session's

  static v1::JobSpec Spec() {
    v1::JobSpec spec;
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(
                    SpecJson({{"world", "1"}, {"optimizer", "sgd"}, {"trainer_sums", "0"}}), &spec)
                    .ok());
    return spec;
  }
  template <typename... Words>
  void Line(const char* verb, const Words&... words) {
    absl::StrAppend(&text_, verb);
    (absl::StrAppend(&text_, " ", words), ...);
    absl::StrAppend(&text_, "\n");
  }
  static std::string Hex(const std::string& bytes) { return absl::BytesToHexString(bytes); }
  template <typename T>
  static std::string HexOf(const T& value) {
    return Hex(std::string(reinterpret_cast<const char*>(&value), sizeof(value)));
  }

  void Enter() {
    const std::string token(kTokenBytes, 't');
    v1::OpenJobRequest open;
    open.set_protocol_version(kProtocolVersions.oldest);
    open.set_newest_protocol_version(kProtocolVersions.newest);
    *open.mutable_spec() = spec_;
    open.set_plan_digest(plan_.digest);
    Line("open", Hex(open.SerializeAsString()));
    v1::AttachRankRequest attach;
    attach.set_job_id(kNumber);
    attach.set_protocol_version(kProtocolVersions.newest);
    const std::string attaches = attach.SerializeAsString();
    Line("attach", Hex(attaches), attaches.find(kNumber));
    v1::SessionRequest request;
    request.mutable_hello()->set_session_id(kNumber);
    request.mutable_hello()->set_token(token);
    const std::string hello = request.SerializeAsString();
    Line("hello", Hex(hello), hello.find(kNumber), hello.find(token));
    shm_internal::RequestWire fds = {};
    std::memcpy(fds.magic, shm_internal::kFdMagic, sizeof(fds.magic));
    fds.protocol_version = static_cast<uint32_t>(kProtocolVersions.newest);
    Line("fds", HexOf(fds), offsetof(shm_internal::RequestWire, session_id), offsetof(shm_internal::RequestWire, token),
         static_cast<int>(kSessionFdCount));
    Line("map", layout_.memory_bytes, layout_.daemon_page_bytes);
  }

  void Send(Opcode opcode, int group = 0, int64_t arg0 = 0, int64_t arg1 = 0, int64_t arg2 = 0, uint32_t flags = 0) {
    CommandRecord record = {};
    record.sequence = records_;
    record.opcode = opcode;
    record.group = group;
    record.arg0 = arg0;
    record.arg1 = arg1;
    record.arg2 = arg2;
    record.flags = flags;
    const int64_t place = records_ % kRingRecords;
    Line("write", layout_.ring_offset_bytes + place * static_cast<int64_t>(sizeof(record)), HexOf(record));
    ++records_;
  }
  void Submit() {
    Line("submit", offsetof(ClientPage, submitted), records_);
    Line("await", offsetof(DaemonPage, consumed), records_);
  }
  static std::string Values(int64_t numel, float first) {
    std::string bytes;
    for (int64_t i = 0; i < numel; ++i) {
      const float value = first + static_cast<float>(i % 17) / 8;
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    return Hex(bytes);
  }

  void InitialValues() {
    int64_t staged = layout_.payload_offset_bytes;
    for (size_t param = 0; param < plan_.params.size(); ++param) {
      const int64_t numel = plan_.params[param].numel;
      Line("write", staged, Values(numel, static_cast<float>(param) + 1));
      Send(Opcode::kWriteParameters, static_cast<int>(param), 0, numel, staged);
      staged += numel * static_cast<int64_t>(sizeof(float));
    }
    Send(Opcode::kCommitParameters);
    Submit();
    Line("await", offsetof(DaemonPage, version), 1);
  }

  // Each group's gradients, a backward that is over, and the optimizer's step.
  void Step() {
    const int groups = static_cast<int>(plan_.groups.size());
    for (int group = 0; group < groups; ++group) {
      Send(Opcode::kUnshard, group, v1::PHASE_FORWARD);
      Send(Opcode::kReshard, group);
    }
    for (int group = groups - 1; group >= 0; --group) {
      Send(Opcode::kUnshard, group, v1::PHASE_BACKWARD);
      if (const int slot = plan_.groups[group].gradient_slot; slot >= 0) {
        const auto& place = plan_.gradient_slots[slot];
        Line("write", layout_.slots_offset_bytes + place.offset_bytes,
             Values(place.size_bytes / static_cast<int64_t>(sizeof(float)), 0.5F));
        Send(Opcode::kSubmitGradients, group);
      }
      Send(Opcode::kReshard, group);
    }
    Send(Opcode::kBackwardDone, 0, 0, 0, 0, kLast);
    Submit();
    v1::Step step;
    step.add_groups()->set_lr(0.25);
    const std::string payload = step.SerializeAsString();
    Line("write", layout_.payload_offset_bytes, Hex(payload));
    Send(Opcode::kStep, 0, static_cast<int64_t>(payload.size()));
    Submit();
    Line("await", offsetof(DaemonPage, version), 2);
  }

  const v1::JobSpec spec_ = Spec();
  const ShardPlan plan_;
  const SessionLayout layout_;
  std::string text_;
  int64_t records_ = 0;
};

class RecordedSession : public Cluster, public ::testing::WithParamInterface<std::string> {
 protected:
  // Of a daemon of its own; its shards at the end.
  std::string Replay(const std::string& text) {
    StartDaemon({}, "cpu:1");
    ReplayedSession session(socket());
    std::string shards;
    for (const Line& line : Lines(text)) {
      if (line.words.size() == 1) {  // to be recorded
        shards = session.Shards(static_cast<size_t>(SessionText().shards_bytes()));
        continue;
      }
      const absl::Status status = session.Run(line);
      EXPECT_TRUE(status.ok()) << status << " in " << line.word(0) << " " << line.word(1);
      if (!status.ok()) break;
      ++lines_;
    }
    EXPECT_EQ(Job().committed_step(), 1);
    return shards;
  }
  int lines_ = 0;
};

TEST_P(RecordedSession, TrainsAStep) {
  const auto record = [this] {
    const std::string text = SessionText().All();
    const std::string shards = Replay(text);
    StopDaemon();
    return absl::StrCat(text.substr(0, text.size() - 1), " ", absl::BytesToHexString(shards), "\n");
  };
  const std::string text = Recorded(GetParam(), "session.txt", record);
  lines_ = 0;
  EXPECT_EQ(Replay(text), "");
  EXPECT_GT(lines_, 20);
}

INSTANTIATE_TEST_SUITE_P(Of, RecordedSession, ::testing::ValuesIn(RecordedVersions()),
                         [](const auto& info) { return VersionName(info.param); });

}  // namespace
}  // namespace shardd::e2e
