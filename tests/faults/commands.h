#ifndef SHARDD_TESTS_FAULTS_COMMANDS_H_
#define SHARDD_TESTS_FAULTS_COMMANDS_H_

// Commands of a client that keeps no rule.

#include <functional>

#include "common/shm/ring.h"
#include "shardd/v1/trainer.pb.h"
#include "tests/faults/raw_client.h"

namespace shardd::faults {

CommandRecord Record(Opcode opcode, int group = 0, int64_t arg0 = 0, int64_t arg1 = 0, int64_t arg2 = 0,
                     uint32_t flags = 0);

// Hyperparameters that are in order.
v1::Step GoodStep();
// By the ring, with as much of the payload as there is room for.
void SendStep(RawClient& client, const v1::Step& step);

// One command, by the stream.
void SendOnStream(RawClient& client, const std::function<void(v1::Command&)>& fill);

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_COMMANDS_H_
