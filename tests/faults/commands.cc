#include "tests/faults/commands.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/plan/session_layout.h"
#include "gtest/gtest.h"

namespace shardd::faults {

CommandRecord Record(Opcode opcode, int group, int64_t arg0, int64_t arg1, int64_t arg2, uint32_t flags) {
  CommandRecord record = {};
  record.opcode = opcode;
  record.group = group;
  record.arg0 = arg0;
  record.arg1 = arg1;
  record.arg2 = arg2;
  record.flags = flags;
  return record;
}

v1::Step GoodStep() {
  v1::Step step;
  v1::HyperParameters& h = *step.add_groups();
  h.set_lr(0.01);
  h.set_beta1(0.9);
  h.set_beta2(0.99);
  h.set_eps(1e-8);
  return step;
}

void SendStep(RawClient& client, const v1::Step& step) {
  const std::string bytes = step.SerializeAsString();
  std::memcpy(client.payload(), bytes.data(), std::min<size_t>(bytes.size(), kStepPayloadBytes));
  client.Send(Record(Opcode::kStep, 0, static_cast<int64_t>(bytes.size())));
}

void SendOnStream(RawClient& client, const std::function<void(v1::Command&)>& fill) {
  v1::SessionRequest request;
  fill(*request.mutable_commands()->add_commands());
  ASSERT_TRUE(client.stream().Write(request));
}

}  // namespace shardd::faults
