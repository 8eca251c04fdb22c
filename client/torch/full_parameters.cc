// Full parameters: read where they lie, or group by group where no node has all of them; and written back.

#include "client/torch/adaptor.h"

namespace shardd {
namespace {

using internal::ParamState;

at::Tensor Copy(const void* data, const ParamState& param, at::ScalarType dtype) {
  return at::from_blob(const_cast<void*>(data), param.storage->shape(), dtype).clone();
}

bool IsOrIsBeneath(const std::string& name, const std::string& module, bool recurse) {
  const bool is_whole = module.empty() || (recurse && module == "(root)");
  return is_whole || name == module || (recurse && name.starts_with(module + "."));
}

// An equal part of every parameter by each of a node's ranks; or all of it by rank 0.
Status WriteBack(Job& job, const std::vector<ParamState>& params, const std::vector<int32_t>& indices,
                 const std::vector<ShardedModule::FullParameter>& parameters, bool rank0_only, bool with_grads) {
  const shardd_job_info info = job.info();
  const int64_t parts = rank0_only ? 1 : info.world_size;
  Status written;
  for (size_t i = 0; i < parameters.size() && written.ok(); ++i) {
    const ParamState& param = params[static_cast<size_t>(indices[i])];
    const at::Tensor value = parameters[i].value.to(param.stored_dtype).contiguous();
    const int64_t numel = value.numel();
    const int64_t first = numel * info.rank / parts;
    const int64_t count = rank0_only ? numel : numel * (info.rank + 1) / parts - first;
    written = job.WriteParameter(indices[i], static_cast<const char*>(value.data_ptr()) + first * value.element_size(),
                                 first, count);
    if (written.ok() && with_grads && parameters[i].grad.defined()) {
      const at::Tensor grad = parameters[i].grad.to(at::kFloat).contiguous();
      written = job.WriteGradient(indices[i], grad.data_ptr<float>() + first, first, count);
    }
  }
  return written;
}

}  // namespace

bool ShardedModule::IsCutOverNodes() { return job().shard_info().shard_world_size > job().info().world_size; }

Status ShardedModule::CopyByGroups(const std::string& module, bool recurse, std::vector<at::Tensor>* copies) {
  copies->assign(state_->params().size(), at::Tensor());
  for (int32_t g = 0; g < job().info().group_count; ++g) {
    const shardd_group_info info = job().group(g).info();
    if (!IsOrIsBeneath(info.name, module, recurse)) {
      continue;
    }
    for (int32_t i = 0; i < info.param_count; ++i) {
      const ParamState& param = state_->params()[static_cast<size_t>(info.params[i])];
      if (state_->options().float8_gathers) {
        return Status(Code::kUnimplemented, "copy full parameter \"" + param.fqn +
                                                "\": it is cut over nodes and gathered in float8, so no node has the "
                                                "stored values of others (got float8_gathers true, want false); read "
                                                "each rank's shard with Job::shard_data");
      }
      if (param.unsharded_dtype != param.stored_dtype) {
        return Status(Code::kUnimplemented, "copy full parameter \"" + param.fqn +
                                                "\": it is cut over nodes and unsharded in another dtype (got " +
                                                toString(param.unsharded_dtype) + ", stored as " +
                                                toString(param.stored_dtype) +
                                                "); read each rank's shard with Job::shard_data");
      }
    }
    Status status = job().group(g).Unshard(SHARDD_FORWARD);
    for (int32_t i = 0; i < info.param_count && status.ok(); ++i) {
      const int32_t index = info.params[i];
      const ParamState& param = state_->params()[static_cast<size_t>(index)];
      status = internal::NoThrow("copy full parameters", [&] {
        (*copies)[static_cast<size_t>(index)] = Copy(job().parameter_data(index), param, param.stored_dtype);
        return Status();
      });
    }
    const Status resharded = job().group(g).Reshard();  // also where the copy failed: other ranks wait for its slot
    if (status.ok()) {
      status = resharded;
    }
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status ShardedModule::UnshardParams(const FullParamsOptions& options,
                                    const std::function<void(std::vector<FullParameter>&)>& body) {
  Job::FullParams full;
  full.recurse = options.recurse;
  full.writeback = options.writeback;
  full.rank0_only = options.rank0_only;
  full.offload_to_cpu = options.offload_to_cpu;
  full.with_grads = options.with_grads;
  if (!options.module.empty()) {
    full.group = job().FindGroup(options.module);
    if (full.group < 0) {
      return Status(Code::kInvalidArgument,
                    "unshard params: no such fully sharded module (got \"" + options.module + "\")");
    }
  }
  std::vector<FullParameter> parameters;
  std::vector<int32_t> indices;
  Status status;
  if (IsCutOverNodes()) {
    if (options.rank0_only || options.with_grads) {
      return Status(Code::kUnimplemented, std::string("unshard params: ") +
                                              (options.rank0_only ? "rank0_only" : "with_grads") +
                                              " is not served where parameters are cut over nodes; leave it out");
    }
    std::vector<at::Tensor> copies;
    status = CopyByGroups(options.module, options.recurse, &copies);
    for (size_t i = 0; i < copies.size() && status.ok(); ++i) {
      if (copies[i].defined()) {
        parameters.push_back({job().parameter_info(static_cast<int32_t>(i)).fqn, copies[i], at::Tensor()});
        indices.push_back(static_cast<int32_t>(i));
      }
    }
    if (status.ok()) {
      body(parameters);
    }
  } else {
    // Read and written in turn: what a rank writes is seen at once, and others may still be copying.
    Job::FullParams reading = full;
    reading.writeback = false;
    status = job().UnshardParams(reading, [&] {
      for (size_t i = 0; i < state_->params().size(); ++i) {
        const ParamState& param = state_->params()[i];
        const int32_t index = static_cast<int32_t>(i);
        const void* const value = job().full_parameter_data(index);
        if (value == nullptr) {
          continue;
        }
        const void* const grad = job().full_gradient_data(index);
        parameters.push_back({job().parameter_info(index).fqn, Copy(value, param, param.stored_dtype),
                              grad == nullptr ? at::Tensor() : Copy(grad, param, at::kFloat)});
        indices.push_back(index);
      }
      body(parameters);
    });
  }
  if (!status.ok() || !options.writeback) {
    return status;
  }
  Status written;
  status = job().UnshardParams(full, [&] {
    written = WriteBack(job(), state_->params(), indices, parameters, options.rank0_only, options.with_grads);
  });
  return status.ok() ? written : status;
}

Status ShardedModule::CopyFullParameters(std::vector<std::pair<std::string, at::Tensor>>* parameters) {
  parameters->clear();
  std::vector<at::Tensor> copies;
  Status copied;
  Status status;
  if (IsCutOverNodes()) {
    status = CopyByGroups("", /*recurse=*/true, &copies);
  } else {
    // What torch throws is kept until the job has left again: the other ranks wait for that.
    status = job().UnshardParams(/*writeback=*/false, [&] {
      copied = internal::NoThrow("copy full parameters", [&] {
        for (size_t i = 0; i < state_->params().size(); ++i) {
          const ParamState& param = state_->params()[i];
          copies.push_back(Copy(job().full_parameter_data(static_cast<int32_t>(i)), param, param.stored_dtype));
        }
        return Status();
      });
    });
  }
  if (status.ok() && copied.ok()) {
    for (const auto& [name, index] : job().ParameterNames()) {
      parameters->emplace_back(name, copies[static_cast<size_t>(index)]);
    }
  }
  return status.ok() ? copied : status;
}

}  // namespace shardd
