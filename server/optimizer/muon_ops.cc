#include "server/optimizer/muon_ops.h"

#include <cstddef>
#include <cstdint>

#include "common/plan/matrices.h"
#include "common/tensor/muon.h"

namespace shardd {
namespace {

MuonParams ParamsOf(const v1::HyperParameters& h, double clip_factor) {
  MuonParams params;
  params.lr = h.lr();
  params.weight_decay = h.weight_decay();
  params.momentum = h.momentum();
  params.eps = h.eps();
  params.nesterov = h.nesterov();
  params.a = h.ns_a();
  params.b = h.ns_b();
  params.c = h.ns_c();
  params.ns_steps = h.ns_steps();
  params.match_rms_adamw = h.adjust_lr() == v1::ADJUST_LR_MATCH_RMS_ADAMW;
  params.grad_scale = clip_factor;
  return params;
}

}  // namespace

std::vector<DeviceOp> MuonOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank,
                              Logged logged) {
  std::vector<DeviceOp> ops;
  const std::vector<int> ranks = RanksOfMatrices(plan, step.present);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    if (ranks[p] != rank) continue;
    const ParamPlan& param = plan.params[p];
    const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(param.flat_param)];
    MuonOp op;
    MuonMatrix& matrix = op.matrix;
    matrix.params = ParamsOf(step.groups[static_cast<size_t>(param.optimizer_group)], step.clip_factor);
    matrix.rows = param.shape[0];
    matrix.cols = param.shape[1];
    const int64_t param_bytes = DTypeSizeBytes(flat.dtype);
    matrix.p = slabs.shards + flat.shards_offset_bytes + param.offset * param_bytes;
    matrix.param_dtype = flat.dtype;
    matrix.g = reinterpret_cast<const float*>(slabs.gradients + flat.gradients_offset_bytes) + param.offset;
    matrix.buf = reinterpret_cast<float*>(slabs.optimizer + flat.optimizer_offset_bytes) + param.offset;
    const bool casts =
        slabs.parameters != nullptr && flat.params_offset_bytes >= 0 && !plan.config.pass_copies() && !step.is_part;
    matrix.cast_dst =
        casts ? slabs.parameters + flat.params_offset_bytes + param.offset * DTypeSizeBytes(flat.unsharded_dtype)
              : nullptr;
    matrix.cast_dtype = flat.unsharded_dtype;
    matrix.workspace = slabs.workspace == nullptr
                           ? nullptr
                           : reinterpret_cast<float*>(slabs.workspace + rank * plan.workspace_stride_bytes);
    op.items = MuonItems(matrix.rows, matrix.cols, matrix.params.ns_steps);
    op.logged = logged;
    logged.first += 2 * param.numel;
    char* const first = static_cast<char*>(matrix.p);
    ops.emplace_back(op);
    for (int copy = 1; copy < plan.shard_copies; ++copy) {
      ops.emplace_back(CopyOp{first, first + copy * plan.shards_stride_bytes, param.numel * param_bytes});
    }
  }
  return ops;
}

}  // namespace shardd
