#ifndef SHARDD_TESTS_COMMON_PLAN_REAL_MODELS_H_
#define SHARDD_TESTS_COMMON_PLAN_REAL_MODELS_H_

// Models of many parameters, as they are trained.

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "tests/common/plan/node_specs.h"

namespace shardd {

struct ModelShape {
  int layers;
  int64_t width;
  int64_t inner;
  int64_t vocabulary;
};
inline constexpr ModelShape kOf7B = {32, 4096, 11008, 32000};  // 291 parameters
inline constexpr ModelShape kOf70B = {80, 8192, 28672, 32000};

// Rows of each parameter over 8 nodes of 8 GPUs, as fully_shard cuts them; torch's Adam in the trainers.
inline SpecBuilder ModelOf(const ModelShape& shape, v1::OptimizerKind kind) {
  SpecBuilder b(8);
  v1::JobConfig& config = b.config();
  config.set_layout(v1::LAYOUT_DIM0);
  config.set_strategy(v1::STRATEGY_FULL_SHARD);
  config.mutable_optimizer()->set_kind(kind);
  if (kind == v1::OPTIMIZER_KIND_TRAINER) {
    config.mutable_optimizer()->set_trainer_states(2);
    config.set_trainers_never_write(false);
    config.set_pass_copies(true);
  }
  AddNodes(&b, 8);
  b.Param(0, "embedding", {shape.vocabulary, shape.width});
  for (int layer = 0; layer < shape.layers; ++layer) {
    const int at = b.AddSharded(0, absl::StrCat("layer", layer));
    for (const char* name : {"q", "k", "v", "o"}) b.Param(at, name, {shape.width, shape.width});
    for (const char* name : {"gate", "up"}) b.Param(at, name, {shape.inner, shape.width});
    b.Param(at, "down", {shape.width, shape.inner});
    for (const char* name : {"norm1", "norm2"}) b.Param(at, name, {shape.width});
  }
  b.Param(0, "norm", {shape.width});
  b.Param(0, "head", {shape.vocabulary, shape.width});
  return b;
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_REAL_MODELS_H_
