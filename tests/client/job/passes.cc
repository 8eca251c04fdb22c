#include "tests/client/job/passes.h"

#include <cstdint>
#include <vector>

namespace shardd::testing_client {

void StepInTrainers(v1::JobSpec* spec) {
  v1::JobConfig& config = *spec->mutable_config();
  config.set_trainers_never_write(false);
  config.mutable_optimizer()->Clear();
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  config.mutable_optimizer()->set_trainer_states(1);
}

void Forward(Rank& rank) {
  const int groups = rank.Info().group_count;
  for (int group = 0; group < groups; ++group) {
    rank.Unshard(group, SHARDD_FORWARD);
    ASSERT_C_OK(shardd_reshard(rank.job(), group));
  }
}

void SubmitGradients(Rank& rank, int group, float value, Gradients gradients) {
  ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
  FillGradients(rank, group, value);
  const shardd_group_info info = rank.GroupInfo(group);
  std::vector<uint8_t> fresh(static_cast<size_t>(info.param_count + 7) / 8, 0);
  for (int i = 0; i < info.param_count; ++i) {
    if (rank.ParamInfo(info.params[i]).requires_grad != 0) {
      fresh[static_cast<size_t>(i) / 8] |= static_cast<uint8_t>(1 << (i % 8));
    }
  }
  const uint8_t* const mask = gradients == Gradients::kReplaced ? fresh.data() : nullptr;
  ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, nullptr, mask));
  ASSERT_C_OK(shardd_reshard(rank.job(), group));
}

void SubmitAll(Rank& rank, float value, Gradients gradients, shardd_phase phase) {
  for (int group = rank.Info().group_count - 1; group >= 0; --group) {
    rank.Unshard(group, phase);
    ASSERT_NO_FATAL_FAILURE(SubmitGradients(rank, group, value, gradients));
  }
}

}  // namespace shardd::testing_client
