// Adafactor's operations: over all ranks they are the update of whole parameters, however these are cut.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/plan/whole_params.h"
#include "common/tensor/adafactor.h"
#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "tests/server/optimizer/killed_whole.h"
#include "tests/server/optimizer/whole_params_fixture.h"

namespace shardd {
namespace {

class AdafactorOpsTest : public WholeParamsTest {
 protected:
  // Adafactor for all but "scale", which is AdamW's; some have fewer rows than there are ranks, and one no dimension.
  void StartWith(int world_size, v1::Layout layout, DType param_dtype,
                 v1::Strategy strategy = v1::STRATEGY_FULL_SHARD) {
    SpecBuilder builder = Model(world_size, layout, param_dtype, strategy);
    builder.Param(1, "kernel", {3, 2, 2, 4});
    builder.Param(1, "shift", {9});
    builder.Param(1, "number", {1});
    StartWhole(std::move(builder), v1::OPTIMIZER_KIND_ADAFACTOR, kWhole);
  }
  DecidedStep Decided(int step) const override {
    v1::HyperParameters h;
    h.set_lr(0.05), h.set_weight_decay(0.1), h.set_beta2_decay(-0.8), h.set_eps(-1), h.set_eps2(1e-3), h.set_d(1);
    return DecidedWith(h, step);
  }
  struct Whole {
    std::vector<float> p, row, col;
  };
  Whole WholeOf(int param, int steps) const {
    const ParamPlan& of = plan_.params[static_cast<size_t>(param)];
    AdafactorTensor tensor;
    tensor.shape = AdafactorShapeOf(of);
    Whole whole = {ParamValues(plan_, param, 1), std::vector<float>(static_cast<size_t>(tensor.shape.row_numel())),
                   std::vector<float>(static_cast<size_t>(tensor.shape.col_numel()))};
    Bytes workspace(AdafactorWorkspaceBytes(tensor.shape));
    for (int step = 1; step <= steps; ++step) {
      const std::vector<float> g = ParamValues(plan_, param, step);
      tensor.params = {0.05, -0.8, 1e-3, 1, 0.1, -1, step, 0.5};
      tensor.p = whole.p.data(), tensor.param_dtype = of.dtype, tensor.g = g.data();
      tensor.row = whole.row.data(), tensor.col = tensor.shape.is_factored ? whole.col.data() : nullptr;
      tensor.workspace = reinterpret_cast<float*>(workspace.data());
      RunAdafactorFrom(tensor, 0, nullptr, 0);
    }
    return whole;
  }
  std::vector<float> State(int param, int state) const {
    return StateAt(param, state, 0, StateNumel(plan_, param, state));
  }
  void ExpectWhole(int steps) const {
    for (const char* fqn : kWhole) {
      const Whole want = WholeOf(Param(fqn), steps);
      EXPECT_EQ(Shard(Param(fqn)), want.p) << fqn;
      EXPECT_EQ(State(Param(fqn), 0), want.row) << fqn;
      EXPECT_EQ(State(Param(fqn), 1), want.col) << fqn;
    }
  }
  static constexpr const char* kWhole[] = {"a.weight", "a.gain", "a.wide", "a.one", "a.kernel", "a.shift", "a.number"};
};

TEST_F(AdafactorOpsTest, AnyCutGivesTheBitsOfWholeParameters) {
  for (const int world_size : {1, 2, 3, 8}) {
    for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
      SCOPED_TRACE(absl::StrCat(world_size, " ", v1::Layout_Name(layout)));
      StartWith(world_size, layout, v1::DTYPE_BFLOAT16);
      RunSteps(3);
      ExpectWhole(3);
    }
  }
}

// What lies behind a state in the parameter's place for it is a hole (HeldRanges).
TEST_F(AdafactorOpsTest, NothingIsWrittenBehindAState) {
  StartWith(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  WriteGradients(1, AllPresent());
  RunUpdate(Decided(1));
  for (const char* fqn : kWhole) {
    for (int state = 0; state < 2; ++state) {
      const int64_t numel = StateNumel(plan_, Param(fqn), state);
      const std::vector<float> behind = StateAt(Param(fqn), state, numel, Place(plan_, Param(fqn)).numel - numel);
      EXPECT_EQ(behind, std::vector<float>(behind.size())) << fqn << " " << state;
    }
  }
}

TEST_F(AdafactorOpsTest, AParameterWithoutAGradientStays) {
  StartWith(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  RunStepWithout("a.weight");
  EXPECT_EQ(Shard(Param("a.weight")), WholeOf(Param("a.weight"), 0).p);
  EXPECT_EQ(Shard(Param("a.wide")), WholeOf(Param("a.wide"), 1).p);
}

TEST_F(AdafactorOpsTest, EachReplicaHasTheParameters) {
  StartWith(4, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED, v1::STRATEGY_HYBRID_SHARD);
  ASSERT_EQ(plan_.shard_copies, 2);
  RunSteps(1);
  ExpectWhole(1);
  for (const char* fqn : kWhole) {
    EXPECT_EQ(ShardInReplica(Param(fqn)), Shard(Param(fqn))) << fqn;
  }
}

class KilledAdafactor : public KilledWhole<AdafactorOpsTest, AdafactorOp> {
 protected:
  // Makes half of a parameter's own blocks, as a daemon does that dies in the midst of an item.
  static void RunHalfOfParam(const AdafactorOp& op, UpdateLog* log) {
    const AdafactorShape& shape = op.tensor.shape;
    AdafactorTensor half = op.tensor;
    std::vector<char> kept(static_cast<size_t>(shape.numel() * DTypeSizeBytes(half.param_dtype)));
    std::memcpy(kept.data(), half.p, kept.size());
    RunAdafactorFrom(half, 0, log, op.logged.first);
    const int64_t numel = shape.numel() / 2, bytes = DTypeSizeBytes(half.param_dtype);
    std::memcpy(static_cast<char*>(half.p) + numel * bytes, kept.data() + numel * bytes,
                static_cast<size_t>((shape.numel() - numel) * bytes));
    log->Done(op.logged.first + shape.row_numel() + shape.col_numel() + numel);
  }
};

TEST_F(KilledAdafactor, AtAnyItemIsCompletedWithTheSameBits) {
  StartWith(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16);
  WriteGradients(1, AllPresent());
  ExpectCompletedBehindEachItem(Decided(1), [](const AdafactorOp& op) {
    const AdafactorShape& shape = op.tensor.shape;
    const int64_t rows = shape.row_numel(), states = rows + shape.col_numel();
    return std::vector<int64_t>{rows, states, states + shape.numel()};
  });
}

// The parameter's RMS of before is gone from it, and the log has it.
TEST_F(KilledAdafactor, HalfOfAParameterIsCompletedWithTheSameBits) {
  StartWith(1, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  WriteGradients(1, AllPresent());
  const Bytes shards = shards_->Copy(), optimizer = optimizer_->Copy();
  RunUpdate(Decided(1));
  const Bytes want = shards_->Copy(), want_optimizer = optimizer_->Copy();
  for (size_t stop = 0; stop < std::size(kWhole); ++stop) {
    CopyTo(shards, shards_.get());
    CopyTo(optimizer, optimizer_.get());
    UpdateLog log = {};
    log.Begin(kStep);
    size_t seen = 0;
    for (const DeviceOp& op : UpdateOps(plan_, slabs_, Decided(1), 0, {&log})) {
      const auto* const of = std::get_if<AdafactorOp>(&op);
      if (of != nullptr && seen++ == stop) {
        RunHalfOfParam(*of, &log);
        break;
      }
      RunCpuOp(op, 0, OpExtent(op));
    }
    for (const DeviceOp& op : UpdateOps(plan_, slabs_, Decided(1), 0, {&log})) {
      EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
    }
    EXPECT_TRUE(*shards_ == want && *optimizer_ == want_optimizer) << kWhole[stop];
  }
}

// What a part of a step keeps before it changes anything.
TEST_F(AdafactorOpsTest, WritesTheWholeParameterAndItsStates) {
  StartWith(1, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  for (const DeviceOp& op : UpdateOps(plan_, slabs_, Decided(1), 0)) {
    const auto* const of = std::get_if<AdafactorOp>(&op);
    if (of == nullptr) continue;
    int64_t bytes = 0;
    for (const UpdateLog::Array& array : WrittenBy(op)) bytes += array.size_bytes;
    const AdafactorShape& shape = of->tensor.shape;
    EXPECT_EQ(bytes, 4 * (shape.numel() + shape.row_numel() + shape.col_numel()));
  }
}

}  // namespace
}  // namespace shardd
