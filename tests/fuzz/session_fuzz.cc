// A session's two ways in: records and payload of its ring, as a client leaves them in memory, and commands of its
// stream.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "google/protobuf/stubs/logging.h"
#include "server/session/session.h"
#include "tests/fuzz/require.h"
#include "tests/fuzz/spec_input.h"

namespace shardd {
namespace {

constexpr uint64_t kEpoch = 3;

std::shared_ptr<const ShardPlan> MakePlan() {
  uint32_t seed = 1;
  for (int tries = 0; tries < 10'000; ++tries) {
    fuzz::SpecMaker maker([&seed] { return seed = seed * 1664525 + 1013904223; });
    absl::StatusOr<ShardPlan> plan = PlanShards(maker.Make());
    if (plan.ok() && plan->groups.size() > 1 && plan->params.size() > 3) {
      return std::make_shared<const ShardPlan>(*std::move(plan));
    }
  }
  std::abort();
}

void CheckCommand(const ShardPlan& plan, const RankCommand& command) {
  const int groups = static_cast<int>(plan.groups.size());
  REQUIRE(OpcodeName(command.opcode) != "invalid");
  if (command.opcode == Opcode::kUnshard || command.opcode == Opcode::kReshard ||
      command.opcode == Opcode::kSubmitGradients) {
    REQUIRE(command.group >= 0 && command.group < groups);
    const size_t params = plan.groups[command.group].params.size();
    REQUIRE(command.present.empty() || command.present.size() == params);
    REQUIRE(command.fresh.empty() || command.fresh.size() == params);
  }
  REQUIRE(command.trainer_state.size() <= static_cast<size_t>(kMaxTrainerStateBytes));
  REQUIRE((command.step != nullptr) == (command.opcode == Opcode::kStep));
  if (command.step != nullptr) {
    REQUIRE(command.step->ByteSizeLong() <= static_cast<size_t>(2 * kStepPayloadBytes));
    // What it takes beside its bytes is that of the job's groups, not of the payload.
    REQUIRE(command.step->SpaceUsedLong() <= command.step->trainer_state().capacity() + 64 * 1024);
  }
}

void Fuzz(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const ShardPlan> plan = MakePlan();
  static uint64_t id = 0;
  absl::StatusOr<std::unique_ptr<Session>> made = Session::Create(plan, ++id, 0, kEpoch);
  REQUIRE(made.ok());
  Session& session = **made;
  const SessionLayout& layout = session.layout();
  Slab& memory = *session.memory()->memory;
  SessionMemoryView view(memory.data(), layout.ring_offset_bytes, layout.masks_offset_bytes);
  // One byte says how many records, then they come; the rest is the payload.
  const size_t records = size == 0 ? 0 : std::min<size_t>(data[0] % 16, (size - 1) / sizeof(CommandRecord));
  size_t at = size == 0 ? 0 : 1;
  for (uint64_t n = 0; n < records; ++n) {
    CommandRecord record;
    std::memcpy(static_cast<void*>(&record), data + at, sizeof(record));
    at += sizeof(record);
    if (record.reserved0 % 8 != 0) record.sequence = n;  // mostly
    if (record.reserved0 % 4 != 0) record.opcode = static_cast<Opcode>(static_cast<uint32_t>(record.opcode) % 16);
    if (record.opcode == Opcode::kStep && record.reserved0 % 2 != 0) {
      record.arg0 = static_cast<int64_t>(size - std::min(size, 1 + records * sizeof(record)));
    }
    view.record(n) = record;
  }
  const size_t rest = std::min<size_t>(size - at, static_cast<size_t>(kStepPayloadBytes));
  if (rest > 0) std::memcpy(memory.At<char>(layout.payload_offset_bytes), data + at, rest);
  view.page().submitted.store(TimelineValue(kEpoch, records));
  for (size_t n = 0; n < records; ++n) {
    const absl::StatusOr<RankCommand> command = session.NextFromRing();
    if (!command.ok()) {
      REQUIRE(!command.status().message().empty() || absl::IsNotFound(command.status()));
      break;
    }
    CheckCommand(*plan, *command);
    session.PublishConsumed();
  }
  v1::CommandBatch batch;
  if (batch.ParseFromArray(data, static_cast<int>(size))) {
    for (const v1::Command& command : batch.commands()) {
      const absl::StatusOr<RankCommand> decoded = session.Decode(command);
      if (decoded.ok()) {
        REQUIRE(OpcodeName(decoded->opcode) != "invalid");
      } else {
        REQUIRE(!decoded.status().message().empty());
      }
    }
  }
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const google::protobuf::LogSilencer quiet;
  shardd::Fuzz(data, size);
  return 0;
}
