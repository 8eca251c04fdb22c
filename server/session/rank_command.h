#ifndef SHARDD_SERVER_SESSION_RANK_COMMAND_H_
#define SHARDD_SERVER_SESSION_RANK_COMMAND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/shm/ring.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// A command after decoding, whether it came by ring or by stream. Plain; nothing in it points into client memory.
struct RankCommand {
  Opcode opcode = Opcode::kInvalid;
  uint32_t flags = 0;
  int32_t group = 0;
  int64_t arg0 = 0;
  int64_t arg1 = 0;
  int64_t arg2 = 0;
  std::vector<bool> present;  // SubmitGradients; by index_in_group
  std::vector<bool> fresh;
  std::unique_ptr<v1::Step> step;  // Step, and null elsewhere: commands are moved often, and most are none
  std::string trainer_state;       // EnterPass
  // WriteParameters: the elements, which copies off the loop share. Null: they lie in the staging area.
  std::shared_ptr<const std::string> values;
  uint64_t done = 0;  // CommandRecord::done
};

absl::string_view OpcodeName(Opcode opcode);

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_RANK_COMMAND_H_
