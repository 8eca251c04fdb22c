#include "client/python/extension/bindings/facts.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "client/python/extension/errors.h"

namespace shardd::python {

py::dict InfoDict(Engine& engine) {
  const shardd_job_info info = engine.attached().info();
  py::dict out;
  out["rank"] = info.rank;
  out["world_size"] = info.world_size;
  out["group_count"] = info.group_count;
  out["param_count"] = info.param_count;
  out["epoch"] = info.epoch;
  out["committed_step"] = info.committed_step;
  out["version"] = info.version;
  out["created"] = info.created != 0;
  out["device"] = std::string(info.device);
  out["address"] = std::string(info.address);
  out["cuda_device"] = info.cuda_device;
  out["stream_ordered"] = info.stream_ordered != 0;
  out["pass_copies"] = info.pass_copies != 0;
  out["lost_nothing"] = info.lost_nothing != 0;
  out["trains_more"] = info.trains_more != 0;
  return out;
}

py::dict ParamDict(Engine& engine, int param) {
  const shardd_param_info info = engine.job().parameter_info(param);
  py::dict out;
  out["fqn"] = std::string(info.fqn);
  out["shape"] = std::vector<int64_t>(info.shape, info.shape + info.ndim);
  out["numel"] = info.numel;
  out["group"] = info.group;
  out["index_in_group"] = info.index_in_group;
  out["flat_param"] = info.flat_param;
  out["offset"] = info.offset_numel;
  out["requires_grad"] = info.requires_grad != 0;
  return out;
}

py::dict FlatParamDict(Engine& engine, int flat_param) {
  shardd_flat_param_info info{};
  info.struct_size = sizeof(info);
  Check(Status::Take(shardd_get_flat_param_info(engine.job().c_job(), flat_param, &info)));
  py::dict out;
  out["group"] = info.group;
  out["params"] = std::vector<int32_t>(info.params, info.params + info.param_count);
  out["numel"] = info.numel;
  out["padded_numel"] = info.padded_numel;
  out["shard_numel"] = info.shard_numel;
  return out;
}

py::tuple ShardPieces(Engine& engine, int flat_param, int rank) {
  Job::ShardPieces found;
  Check(engine.job().GetShardPieces(flat_param, rank, &found));
  py::list pieces;
  for (const shardd_shard_piece& piece : found.pieces) {
    pieces.append(py::make_tuple(piece.param, piece.first, piece.numel, piece.offset_numel));
  }
  return py::make_tuple(pieces, found.padding_numel);
}

py::dict RangeDict(Engine& engine, int param) {
  const shardd_shard_range range = engine.job().shard_range(param);
  py::dict out;
  out["first"] = range.first;
  out["numel"] = range.numel;
  out["gradient_first"] = range.gradient_first;
  out["gradient_numel"] = range.gradient_numel;
  out["replica_index"] = engine.job().shard_info().replica_index;
  return out;
}

}  // namespace shardd::python
