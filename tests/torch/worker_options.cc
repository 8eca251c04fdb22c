#include "tests/torch/worker_options.h"

#include <nlohmann/json.hpp>

namespace shardd_test {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerOptions, mode, address, out, job, nodes, ranks, rank, model, strategy, layout,
                                   unshard_mode, prefetch, optimizer, dtype, steps, accumulate, recompute, penalty,
                                   overlap, clip, norm, fail_at, two_groups, replace, left_out, own_job, same_data,
                                   float8_gathers, strict_order, by_name, kill_at, victim)

std::string ToJson(const WorkerOptions& options) { return nlohmann::json(options).dump(); }
WorkerOptions FromJson(const std::string& text) { return nlohmann::json::parse(text).get<WorkerOptions>(); }

}  // namespace shardd_test
