// Muon's operations: over all ranks they are the update of whole matrices, however these are cut.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/plan/whole_params.h"
#include "common/tensor/muon.h"
#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "tests/server/optimizer/killed_whole.h"
#include "tests/server/optimizer/whole_params_fixture.h"

namespace shardd {
namespace {

constexpr const char* kMatrices[] = {"a.weight", "a.gain", "a.wide", "a.one"};

class MuonOpsTest : public WholeParamsTest {
 protected:
  // Muon for the matrices, and AdamW for the rest.
  void StartWith(int world_size, v1::Layout layout, DType param_dtype,
                 v1::Strategy strategy = v1::STRATEGY_FULL_SHARD) {
    StartWhole(Model(world_size, layout, param_dtype, strategy), v1::OPTIMIZER_KIND_MUON, kMatrices);
  }
  static v1::HyperParameters MuonHyper() {
    v1::HyperParameters h;
    h.set_lr(0.02), h.set_weight_decay(0.1), h.set_momentum(0.95), h.set_nesterov(true), h.set_eps(1e-7);
    h.set_ns_a(3.4445), h.set_ns_b(-4.775), h.set_ns_c(2.0315), h.set_ns_steps(5);
    return h;
  }
  DecidedStep Decided(int step) const override { return DecidedWith(MuonHyper(), step); }
  struct Whole {
    std::vector<float> p, buf;
  };
  Whole WholeOf(int param, int steps) const {
    const ParamPlan& of = plan_.params[static_cast<size_t>(param)];
    Whole whole = {ParamValues(plan_, param, 1), std::vector<float>(static_cast<size_t>(of.numel))};
    Bytes workspace(MuonWorkspaceBytes(of.shape[0], of.shape[1]));
    for (int step = 1; step <= steps; ++step) {
      const std::vector<float> g = ParamValues(plan_, param, step);
      MuonMatrix matrix;
      matrix.params = {0.02, 0.1, 0.95, 1e-7, true, 3.4445, -4.775, 2.0315, 5, false, 0.5};
      matrix.rows = of.shape[0], matrix.cols = of.shape[1], matrix.p = whole.p.data(), matrix.param_dtype = of.dtype;
      matrix.g = g.data(), matrix.buf = whole.buf.data();
      matrix.workspace = reinterpret_cast<float*>(workspace.data());
      RunMuonFrom(matrix, 0, nullptr, 0);
    }
    return whole;
  }
  std::vector<float> Buffer(int param) const { return StateAt(param, 0, 0, Place(plan_, param).numel); }
  void ExpectWhole(int steps) const {
    for (const char* fqn : kMatrices) {
      const Whole want = WholeOf(Param(fqn), steps);
      EXPECT_EQ(Shard(Param(fqn)), want.p) << fqn;
      EXPECT_EQ(Buffer(Param(fqn)), want.buf) << fqn;
    }
  }
};

TEST_F(MuonOpsTest, AnyCutGivesTheBitsOfWholeMatrices) {
  for (const int world_size : {1, 2, 3, 8}) {
    for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
      SCOPED_TRACE(absl::StrCat(world_size, " ", v1::Layout_Name(layout)));
      StartWith(world_size, layout, v1::DTYPE_BFLOAT16);
      RunSteps(3);
      ExpectWhole(3);
      for (const char* fqn : kMatrices) {
        std::vector<uint16_t> cast(Shard(Param(fqn)).size());
        Cast(Shard(Param(fqn)).data(), v1::DTYPE_FLOAT32, cast.data(), v1::DTYPE_BFLOAT16,
             static_cast<int64_t>(cast.size()));
        std::vector<float> want(cast.size());
        Cast(cast.data(), v1::DTYPE_BFLOAT16, want.data(), v1::DTYPE_FLOAT32, static_cast<int64_t>(want.size()));
        EXPECT_EQ(CastCopy(Param(fqn)), want) << fqn;
      }
    }
  }
}

// What has no gradient stays, with its buffer.
TEST_F(MuonOpsTest, AMatrixWithoutAGradientStays) {
  StartWith(2, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  RunStepWithout("a.weight");
  EXPECT_EQ(Shard(Param("a.weight")), WholeOf(Param("a.weight"), 0).p);
  EXPECT_EQ(Shard(Param("a.wide")), WholeOf(Param("a.wide"), 1).p);
}

TEST_F(MuonOpsTest, EachReplicaHasTheMatrices) {
  StartWith(4, v1::LAYOUT_DIM0, v1::DTYPE_UNSPECIFIED, v1::STRATEGY_HYBRID_SHARD);
  ASSERT_EQ(plan_.shard_copies, 2);
  RunSteps(1);
  ExpectWhole(1);
  for (const char* fqn : kMatrices) {
    EXPECT_EQ(ShardInReplica(Param(fqn)), Shard(Param(fqn))) << fqn;
  }
}

// Beside hand-ins a rank casts what is in its own part, and never a matrix that another one is updating.
TEST_F(MuonOpsTest, CopiesForACommitLeaveUpdatedMatricesOut) {
  StartWith(3, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16);
  std::vector<bool> updated = AllPresent();
  updated[static_cast<size_t>(Param("a.gain"))] = false;
  int64_t casts = 0, all = 0;
  for (int rank = 0; rank < 3; ++rank) {
    for (const DeviceOp& op : CommitOps(plan_, slabs_, rank, updated)) casts += OpExtent(op);
    for (const DeviceOp& op : CommitOps(plan_, slabs_, rank)) all += OpExtent(op);
  }
  EXPECT_EQ(all - casts, 7 * 15 + 2 * 300 + 5);
}

using KilledMuon = KilledWhole<MuonOpsTest, MuonOp>;

TEST_F(KilledMuon, AtAnyItemIsCompletedWithTheSameBits) {
  StartWith(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16);
  WriteGradients(1, AllPresent());
  ExpectCompletedBehindEachItem(Decided(1), [](const MuonOp& op) {
    const int64_t numel = op.matrix.rows * op.matrix.cols;
    return std::vector<int64_t>{numel, 2 * numel};  // its buffer, then the matrix
  });
}

TEST_F(MuonOpsTest, ASuccessorWithoutMemoryToWorkInSaysSo) {
  MuonOp op;
  op.matrix.rows = op.matrix.cols = int64_t{1} << 24;  // more than processes have addresses; nothing of it is touched
  const absl::Status status = CompleteCpuOp(op, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("16777216 x 16777216 matrix: no memory to work in"));
}

// What a part of a step keeps before it changes anything.
TEST_F(MuonOpsTest, WritesTheWholeMatrixAndItsBuffer) {
  StartWith(1, v1::LAYOUT_FLAT, v1::DTYPE_UNSPECIFIED);
  int64_t bytes = 0;
  for (const DeviceOp& op : UpdateOps(plan_, slabs_, Decided(1), 0)) {
    if (!std::holds_alternative<MuonOp>(op)) continue;
    for (const UpdateLog::Array& array : WrittenBy(op)) bytes += array.size_bytes;
  }
  EXPECT_EQ(bytes, 8 * (7 * 15 + 3 * 2 + 2 * 300 + 5));
}

}  // namespace
}  // namespace shardd
