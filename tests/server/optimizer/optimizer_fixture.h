#ifndef SHARDD_TESTS_SERVER_OPTIMIZER_OPTIMIZER_FIXTURE_H_
#define SHARDD_TESTS_SERVER_OPTIMIZER_OPTIMIZER_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/device/device.h"
#include "server/device/devices.h"
#include "server/optimizer/optimizer.h"
#include "tests/common/plan/odd_params.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/server/device/plan_slabs.h"

namespace shardd {

// A model with odd sizes (alignment gaps), a frozen parameter and two modules. "a.bias" and "a.norm" are optimizer
// group 1, in the middle of a flat parameter.
inline SpecBuilder OptimizerModel(int world_size, v1::Layout layout, v1::Strategy strategy, DType param_dtype,
                                  v1::OptimizerKind kind) {
  SpecBuilder builder(world_size);
  builder.config().set_layout(layout);
  builder.config().set_strategy(strategy);
  builder.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
  builder.config().mutable_optimizer()->set_kind(kind);
  builder.config().mutable_optimizer()->set_momentum(kind == v1::OPTIMIZER_KIND_SGD);
  AddOddParams(&builder);
  v1::OptimizerConfig::Group* group = builder.config().mutable_optimizer()->add_groups();
  group->add_fqns("a.bias");
  group->add_fqns("a.norm");
  return builder;
}

inline v1::HyperParameters AdamWHyper(double lr, double weight_decay) {
  v1::HyperParameters h;
  h.set_lr(lr);
  h.set_weight_decay(weight_decay);
  h.set_beta1(0.9);
  h.set_beta2(0.95);
  h.set_eps(1e-8);
  return h;
}

inline v1::HyperParameters SgdHyper(double lr, double momentum) {
  v1::HyperParameters h;
  h.set_lr(lr);
  h.set_momentum(momentum);
  h.set_weight_decay(0.1);
  return h;
}

// A job's slabs and a device to run operations on.
class OptimizerTest : public ::testing::Test {
 protected:
  OptimizerTest() : device_(std::move(MakeDevices("cpu:1")->devices.front())) {}

  // Parameters as ParamValues(seed 1); everything between parameters, and gradients not written yet, is NaN, so that
  // reading it shows; optimizer state is zero, as new slabs are.
  void Start(const SpecBuilder& builder) {
    plan_ = builder.Plan();
    shards_ = std::make_unique<Bytes>(plan_.memory.shards_bytes, 0xff);
    parameters_ = std::make_unique<Bytes>(plan_.memory.parameters_bytes, 0xff);
    gradients_ = std::make_unique<Bytes>(plan_.memory.gradients_bytes, 0xff);
    optimizer_ = std::make_unique<Bytes>(plan_.memory.optimizer_bytes, 0);
    slabs_ = {shards_->data(), plan_.memory.parameters_bytes > 0 ? parameters_->data() : nullptr, gradients_->data(),
              optimizer_->data()};
    for (size_t p = 0; p < plan_.params.size(); ++p) {
      WriteShard(plan_, *shards_, static_cast<int>(p), ParamValues(plan_, static_cast<int>(p), 1));
    }
  }
  void WriteGradients(int seed, const std::vector<bool>& present) {
    for (size_t p = 0; p < plan_.params.size(); ++p) {
      if (present[p])
        WriteGradient(plan_, *gradients_, static_cast<int>(p), ParamValues(plan_, static_cast<int>(p), seed));
    }
  }
  // Every trainable parameter.
  std::vector<bool> AllPresent() const {
    std::vector<bool> present;
    for (const ParamPlan& param : plan_.params) present.push_back(param.requires_grad);
    return present;
  }
  void Run(std::vector<DeviceOp> ops) {
    absl::Notification done;
    device_->Submit(StreamId::kOptimizer, {"test", std::move(ops), [&](absl::Status status) {
                                             EXPECT_TRUE(status.ok()) << status;
                                             done.Notify();
                                           }});
    ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
  }
  void RunUpdate(const DecidedStep& step) {
    for (int rank = 0; rank < plan_.world_size; ++rank) Run(UpdateOps(plan_, slabs_, step, rank));
  }
  double GradientNorm(const std::vector<bool>& present, double order = 2) {
    Norm norm(order);
    for (int rank = 0; rank < plan_.world_size; ++rank) Run(NormOps(plan_, slabs_, present, rank, &norm));
    return norm.value();
  }
  int Param(const char* fqn) const { return plan_.FindParam(fqn); }
  std::vector<float> Shard(int param) const { return ReadShard(plan_, *shards_, param); }
  std::vector<float> CastCopy(int param) const {
    const Place at(plan_, param);
    return ReadAs(parameters_->data() + at.flat.params_offset_bytes, at.flat.unsharded_dtype, at.offset, at.numel);
  }

  ShardPlan plan_;
  std::unique_ptr<Bytes> shards_, parameters_, gradients_, optimizer_;
  SlabPointers slabs_;
  std::unique_ptr<Device> device_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_OPTIMIZER_OPTIMIZER_FIXTURE_H_
