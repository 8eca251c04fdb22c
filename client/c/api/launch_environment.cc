#include "client/c/api/launch_environment.h"

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/process/environment.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// A launcher's variables; null: it has none.
struct Launcher {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;  // a number; srun's is a list, one for each node
  const char* node;
};
constexpr Launcher kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"};
constexpr Launcher kOthers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     nullptr},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    // Of a step, which srun begins: a batch script, too, has SLURM_PROCID and SLURM_NTASKS, and is no rank of anything.
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr, "SLURM_NODEID"},
};
constexpr char kTasksOfNodes[] = "SLURM_STEP_TASKS_PER_NODE";

absl::StatusOr<int> Number(const char* name, int smallest) {
  if (name == nullptr) return -1;
  return EnvironmentNumber(name, smallest);
}

// Of "2(x3),1", where nodes 0 to 2 have two and node 3 has one; -1: it does not say.
absl::StatusOr<int> TasksOfNode(int node) {
  const std::string text = Environment(kTasksOfNodes);
  int first = 0;
  for (absl::string_view entry : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    int nodes = 1;
    int tasks = 0;
    const size_t times = entry.find("(x");
    const bool repeats = times != absl::string_view::npos;
    if (!absl::SimpleAtoi(entry.substr(0, times), &tasks) || tasks < 1 ||
        (repeats && (!absl::SimpleAtoi(absl::StripSuffix(entry.substr(times + 2), ")"), &nodes) || nodes < 1))) {
      return absl::InvalidArgumentError(absl::StrCat("attach: environment variable ", kTasksOfNodes,
                                                     " is no list of numbers of tasks (got \"", text,
                                                     "\", want one as in 2(x3),1)"));
    }
    first += nodes;
    if (node < first) return tasks;
  }
  return -1;
}

absl::Status Read(const Launcher& launcher, LaunchEnvironment* out) {
  SHARDD_ASSIGN_OR_RETURN(out->rank, Number(launcher.rank, 0));
  SHARDD_ASSIGN_OR_RETURN(out->local_rank, Number(launcher.local_rank, 0));
  SHARDD_ASSIGN_OR_RETURN(out->node, Number(launcher.node, 0));
  SHARDD_ASSIGN_OR_RETURN(const int world, Number(launcher.world_size, 1));
  SHARDD_ASSIGN_OR_RETURN(int local_world, Number(launcher.local_world_size, 1));
  if (launcher.local_world_size == nullptr && out->node >= 0) {
    SHARDD_ASSIGN_OR_RETURN(local_world, TasksOfNode(out->node));
  }
  out->world_size = std::max(world, 0);
  out->local_world_size = std::max(local_world, 0);
  // Where ranks are given to nodes one node after another, as launchers do unless they are told otherwise, ranks say
  // which node it is.
  if (launcher.node == nullptr && out->rank >= 0 && out->local_rank >= 0 && local_world > 0) {
    const int before = out->rank - out->local_rank;
    out->node = before >= 0 && before % local_world == 0 ? before / local_world : -1;
  }
  return absl::OkStatus();
}

absl::StatusOr<Control> ReadControl() {
  const std::string text = Environment("SHARDD_CONTROL");
  if (text.empty()) return Control::kAny;
  if (text == "ring") return Control::kRing;
  if (text == "grpc") return Control::kGrpc;
  return absl::InvalidArgumentError(absl::StrCat(
      "attach: environment variable SHARDD_CONTROL is no way to the daemon (got \"", text, "\", want ring or grpc)"));
}

bool IsSet(const char* name) { return !Environment(name).empty(); }

}  // namespace

absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment() {
  LaunchEnvironment result;
  const auto* const other = std::find_if(std::begin(kOthers), std::end(kOthers), [](const Launcher& launcher) {
    return IsSet(launcher.rank) && IsSet(launcher.world_size);
  });
  const bool by_torchrun = other == std::end(kOthers) || IsSet(kTorchrun.rank) || IsSet(kTorchrun.local_rank) ||
                           IsSet(kTorchrun.world_size) || IsSet(kTorchrun.local_world_size);
  SHARDD_RETURN_IF_ERROR(Read(by_torchrun ? kTorchrun : *other, &result));
  if (result.rank < 0 && result.local_world_size > 0 && result.local_world_size == result.world_size) {
    result.rank = result.local_rank;
  }
  SHARDD_ASSIGN_OR_RETURN(const int node, EnvironmentNumber("SHARDD_NODE", 0));
  if (node >= 0) result.node = node;
  SHARDD_ASSIGN_OR_RETURN(const int grace_ms, EnvironmentNumber("SHARDD_GRACE_MS", 0));
  SHARDD_ASSIGN_OR_RETURN(const int daemon_wait_ms, EnvironmentNumber("SHARDD_DAEMON_WAIT_MS", 0));
  SHARDD_ASSIGN_OR_RETURN(result.control, ReadControl());
  result.grace_ms = std::max(grace_ms, 0);
  result.daemon_wait_ms = std::max(daemon_wait_ms, 0);
  return result;
}

}  // namespace shardd
