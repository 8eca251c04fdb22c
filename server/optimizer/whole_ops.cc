#include "server/optimizer/whole_ops.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/plan/optimizer_kinds.h"
#include "common/plan/whole_params.h"
#include "common/tensor/adafactor.h"
#include "common/tensor/muon.h"

namespace shardd {
namespace {

// Where one parameter lies in each slab.
struct WholeAddresses {
  char* p = nullptr;
  DType dtype = v1::DTYPE_UNSPECIFIED;
  const float* g = nullptr;
  float* states[2] = {};  // the second one only where the flat parameter has two
  void* cast_dst = nullptr;
  DType cast_dtype = v1::DTYPE_UNSPECIFIED;
  float* workspace = nullptr;
};

WholeAddresses WholeAddressesOf(const ShardPlan& plan, const SlabPointers& slabs, const ParamPlan& param, int rank,
                                bool is_part) {
  const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(param.flat_param)];
  WholeAddresses at;
  at.p = slabs.shards + flat.shards_offset_bytes + param.offset * DTypeSizeBytes(flat.dtype);
  at.dtype = flat.dtype;
  at.g = reinterpret_cast<const float*>(slabs.gradients + flat.gradients_offset_bytes) + param.offset;
  for (int state = 0; state < 2 && state < flat.optimizer_states; ++state) {
    char* const first = slabs.optimizer + flat.optimizer_offset_bytes + state * flat.StateStrideBytes();
    at.states[state] = reinterpret_cast<float*>(first) + param.offset;
  }
  const bool casts =
      slabs.parameters != nullptr && flat.params_offset_bytes >= 0 && !plan.config.pass_copies() && !is_part;
  at.cast_dst = casts
                    ? slabs.parameters + flat.params_offset_bytes + param.offset * DTypeSizeBytes(flat.unsharded_dtype)
                    : nullptr;
  at.cast_dtype = flat.unsharded_dtype;
  at.workspace = slabs.workspace == nullptr
                     ? nullptr
                     : reinterpret_cast<float*>(slabs.workspace + rank * plan.workspace_stride_bytes);
  return at;
}

// What updates of both kinds read and write; states are each kind's own.
template <typename Whole>
void SetWholeArrays(const WholeAddresses& at, Whole* whole) {
  whole->p = at.p;
  whole->param_dtype = at.dtype;
  whole->g = at.g;
  whole->cast_dst = at.cast_dst;
  whole->cast_dtype = at.cast_dtype;
  whole->workspace = at.workspace;
}

MuonOp MakeMuonOp(const ParamPlan& param, const WholeAddresses& at, const v1::HyperParameters& h, double clip_factor) {
  MuonOp op;
  MuonMatrix& matrix = op.matrix;
  matrix.params.lr = h.lr();
  matrix.params.weight_decay = h.weight_decay();
  matrix.params.momentum = h.momentum();
  matrix.params.eps = h.eps();
  matrix.params.nesterov = h.nesterov();
  matrix.params.a = h.ns_a();
  matrix.params.b = h.ns_b();
  matrix.params.c = h.ns_c();
  matrix.params.ns_steps = h.ns_steps();
  matrix.params.match_rms_adamw = h.adjust_lr() == v1::ADJUST_LR_MATCH_RMS_ADAMW;
  matrix.params.grad_scale = clip_factor;
  matrix.rows = param.shape[0];
  matrix.cols = param.shape[1];
  SetWholeArrays(at, &matrix);
  matrix.buf = at.states[0];
  op.items = MuonItems(matrix.rows, matrix.cols, matrix.params.ns_steps);
  return op;
}

// `number`: of this update, from 1 on.
AdafactorOp MakeAdafactorOp(const ParamPlan& param, const WholeAddresses& at, const v1::HyperParameters& h,
                            double clip_factor, int64_t number) {
  AdafactorOp op;
  AdafactorTensor& tensor = op.tensor;
  tensor.params.lr = h.lr();
  tensor.params.beta2_decay = h.beta2_decay();
  tensor.params.eps1 = h.eps();
  tensor.params.eps2 = h.eps2();
  tensor.params.d = h.d() == 0 ? 1 : h.d();
  tensor.params.weight_decay = h.weight_decay();
  tensor.params.step = number;
  tensor.params.grad_scale = clip_factor;
  tensor.shape = AdafactorShapeOf(param);
  SetWholeArrays(at, &tensor);
  tensor.row = at.states[0];
  tensor.col = tensor.shape.is_factored ? at.states[1] : nullptr;
  op.items = AdafactorItems(tensor.shape);
  return op;
}

}  // namespace

std::vector<DeviceOp> WholeOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank,
                               Logged logged) {
  std::vector<DeviceOp> ops;
  const std::vector<int> ranks = RanksOfWholeParams(plan, step.present);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    if (ranks[p] != rank) continue;
    const ParamPlan& param = plan.params[p];
    const v1::HyperParameters& h = step.groups[static_cast<size_t>(param.optimizer_group)];
    const WholeAddresses at = WholeAddressesOf(plan, slabs, param, rank, step.is_part);
    int64_t logged_numel = 0;
    if (OptimizerKindOf(plan.config.optimizer(), param.optimizer_group) == v1::OPTIMIZER_KIND_MUON) {
      MuonOp op = MakeMuonOp(param, at, h, step.clip_factor);
      op.logged = logged;
      logged_numel = 2 * param.numel;
      ops.emplace_back(std::move(op));
    } else {
      AdafactorOp op = MakeAdafactorOp(param, at, h, step.clip_factor, step.step_counts[p] + 1);
      op.logged = logged;
      logged_numel = op.tensor.shape.row_numel() + op.tensor.shape.col_numel() + param.numel;
      ops.emplace_back(std::move(op));
    }
    logged.first += logged_numel;
    for (int copy = 1; copy < plan.shard_copies; ++copy) {
      ops.emplace_back(CopyOp{at.p, at.p + copy * plan.shards_stride_bytes, param.numel * DTypeSizeBytes(at.dtype)});
    }
  }
  return ops;
}

}  // namespace shardd
