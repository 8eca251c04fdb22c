#include "client/python/extension/bindings/facts.h"

#include <string>

namespace shardd::python {

namespace py = pybind11;

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
  return out;
}

py::dict ParamDict(Engine& engine, int param) {
  const shardd_param_info info = engine.job().parameter_info(param);
  py::dict out;
  out["fqn"] = std::string(info.fqn);
  out["numel"] = info.numel;
  out["group"] = info.group;
  out["index_in_group"] = info.index_in_group;
  out["flat_param"] = info.flat_param;
  out["offset"] = info.offset_numel;
  out["requires_grad"] = info.requires_grad != 0;
  return out;
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
