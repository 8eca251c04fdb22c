#ifndef SHARDD_SERVER_SESSION_COMMAND_DECODER_H_
#define SHARDD_SERVER_SESSION_COMMAND_DECODER_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan/plan.h"
#include "server/session/rank_command.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Checks what a rank's client sends against the job's plan. Immutable.
class CommandDecoder {
 public:
  CommandDecoder(std::shared_ptr<const ShardPlan> plan, int rank) : plan_(std::move(plan)), rank_(rank) {}

  // A command that came by the stream. INVALID_ARGUMENT: malformed.
  absl::StatusOr<RankCommand> Decode(const v1::Command& command) const;
  // INVALID_ARGUMENT: `bytes` are no Step, or one with more fields than this job's can have.
  absl::Status ParseStep(absl::string_view bytes, v1::Step* step) const;
  // The group's mask: a bit for each of its parameters, by index_in_group. REQUIRES: a group of the plan.
  std::vector<bool> CopyMask(const uint8_t* mask, int group) const;

 private:
  int64_t MostOptimizerGroups() const;
  int64_t MostFieldsOfAStep() const;

  const std::shared_ptr<const ShardPlan> plan_;
  const int rank_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_COMMAND_DECODER_H_
