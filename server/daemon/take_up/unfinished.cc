#include "server/daemon/take_up/unfinished.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status/status_macros.h"
#include "common/tensor/muon.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/device.h"
#include "server/device/device_op.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "server/job/work/optimizer_devices.h"
#include "server/loop/in_parallel.h"
#include "server/observe/log.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/take_up_log.h"
#include "server/storage/undo_slab.h"

namespace shardd {
namespace {

absl::StatusOr<DecidedStep> DecidedStepOf(const ShardPlan& plan, const v1::DecidedStepRecord& record) {
  DecidedStep step;
  step.groups.assign(record.groups().begin(), record.groups().end());
  step.clip_factor = record.clip_factor();
  step.step_counts.assign(record.step_counts().begin(), record.step_counts().end());
  if (step.step_counts.size() != plan.params.size() || record.present().size() * 8 < plan.params.size() ||
      record.groups_size() != OptimizerGroups(plan)) {
    return absl::DataLossError(absl::StrCat("the record of step ", record.step(), " is of another plan"));
  }
  for (size_t param = 0; param < plan.params.size(); ++param) {
    step.present.push_back((record.present()[param / 8] >> (param % 8) & 1) != 0);
  }
  return step;
}

// What a log says of a torn block is no reason to write elsewhere than there.
absl::Status CheckLogs(const std::vector<DeviceOp>& ops, int64_t step) {
  for (const DeviceOp& op : ops) {
    const Logged* const logged = LoggedOf(op);
    if (logged == nullptr || !logged->log->is_torn(step)) continue;
    const int64_t most = logged->place.old == nullptr ? UpdateLog::kBlockNumel : logged->place.numel;
    if (const int64_t numel = logged->log->block_numel(); numel < 1 || numel > most) {
      return absl::DataLossError(absl::StrCat("take-up log: the block of step ", step, "'s update that is torn has ",
                                              numel, " elements (want 1 to ", most, ")"));
    }
  }
  return absl::OkStatus();
}

// Of the whole update: the log says how much of it is left.
std::string SizeText(const std::vector<std::vector<DeviceOp>>& parts) {
  int64_t elements = 0, matrices = 0;
  double multiplications = 0;
  for (const std::vector<DeviceOp>& part : parts) {
    for (const DeviceOp& op : part) {
      if (const auto* const muon = std::get_if<MuonOp>(&op); muon != nullptr) {
        const MuonMatrix& matrix = muon->matrix;
        ++matrices;
        elements += matrix.rows * matrix.cols;
        multiplications += MuonCost(matrix.rows, matrix.cols, matrix.params.ns_steps);
      } else if (const auto* const adafactor = std::get_if<AdafactorOp>(&op); adafactor != nullptr) {
        elements += adafactor->tensor.shape.numel();
      } else if (LoggedOf(op) != nullptr) {
        elements += OpExtent(op);
      }
    }
  }
  return absl::StrCat(elements, " elements",
                      matrices == 0 ? ""
                                    : absl::StrCat(", ", matrices, " matrices among them, with ",
                                                   std::llround(multiplications / 1e9), "e9 multiplications"));
}

absl::Status RunHere(const std::vector<DeviceOp>& ops) {
  for (const DeviceOp& op : ops) {
    SHARDD_RETURN_IF_ERROR(CheckCpuOp(op));
    SHARDD_RETURN_IF_ERROR(CompleteCpuOp(op, /*step=*/0));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CompleteStep(const ShardPlan& plan, const v1::DecidedStepRecord& record, const SlabPointers& slabs,
                          const TakeUpLog& log, bool written) {
  SHARDD_ASSIGN_OR_RETURN(const DecidedStep step, DecidedStepOf(plan, record));
  std::vector<std::vector<DeviceOp>> parts;  // of all ranks
  for (int rank = 0; rank < plan.world_size; ++rank) {
    UpdateLog& update = log.update(rank);
    // As the daemon before had divided it, or not at all yet.
    const bool begun = update.is_of(record.step());
    const int count = begun ? static_cast<int>(std::clamp<int64_t>(update.parts(), 1, log.parts())) : 1;
    DeviceOps of_rank = SplitOps(UpdateOps(plan, slabs, step, rank, {&update}), count);
    LogByPart(
        of_rank.data(), count, [&](int part) -> UpdateLog& { return log.update(rank, part); },
        [&](UpdateLog& of_part, int64_t first) {
          if (!of_part.is_of(record.step())) of_part.Begin(record.step(), first, count);
        });
    for (std::vector<DeviceOp>& part : of_rank) parts.push_back(std::move(part));
  }
  for (const std::vector<DeviceOp>& part : parts) {
    for (const DeviceOp& op : part) SHARDD_RETURN_IF_ERROR(CheckCpuOp(op));
    SHARDD_RETURN_IF_ERROR(CheckLogs(part, record.step()));
  }
  LogInfo(absl::StrCat("completes the update of step ", record.step(), " that the daemon before has left (",
                       SizeText(parts), "); the job's ranks wait for it"));
  // Ranks wait for this: a large model takes one thread seconds, and large matrices of Muon minutes.
  std::vector<absl::Status> completed(parts.size());
  InParallel(parts.size(), [&](size_t part) {
    for (const DeviceOp& op : parts[part]) {
      if (completed[part].ok()) completed[part] = CompleteCpuOp(op, record.step());
    }
  });
  for (const absl::Status& status : completed) SHARDD_RETURN_IF_ERROR(status);
  for (int rank = 0; rank < plan.world_size && written; ++rank) {
    SHARDD_RETURN_IF_ERROR(RunHere(CommitOps(plan, slabs, rank)));
  }
  return absl::OkStatus();
}

absl::Status RunOnDevices(const std::vector<Device*>& devices, const char* label,
                          std::vector<std::vector<DeviceOp>> by_rank) {
  struct Running {
    absl::Mutex mutex;
    size_t left = 0;
    absl::Status status;
  } running;
  running.left = by_rank.size();
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    devices[rank % devices.size()]->Submit(StreamId::kOptimizer,
                                           {label, std::move(by_rank[rank]), [&running](const absl::Status& status) {
                                              absl::MutexLock lock(&running.mutex);
                                              running.status.Update(status);
                                              --running.left;
                                            }});
  }
  absl::MutexLock lock(&running.mutex);
  running.mutex.Await(absl::Condition(
      +[](size_t* left) { return *left == 0; }, &running.left));
  return running.status;
}

absl::Status CompleteStepOnGpus(const ShardPlan& plan, const v1::DecidedStepRecord& record, const JobMemory& memory,
                                const TakeUpLog& log, const std::vector<Device*>& devices) {
  SHARDD_ASSIGN_OR_RETURN(const DecidedStep step, DecidedStepOf(plan, record));
  std::vector<std::vector<DeviceOp>> put_back, rest;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    UpdateLog& update = log.update(rank);
    if (!update.is_of(record.step())) update.Begin(record.step());
    const std::vector<DeviceOp> ops = UpdateOps(plan, memory.pointers(), step, rank, memory.LoggedBy(&update, rank));
    SHARDD_RETURN_IF_ERROR(CheckLogs(ops, record.step()));
    RestOfUpdate of_rank = RestOf(ops, record.step());
    put_back.push_back(std::move(of_rank.put_back));
    rest.push_back(std::move(of_rank.ops));
  }
  SHARDD_RETURN_IF_ERROR(RunOnDevices(devices, "put torn values back", std::move(put_back)));
  for (int rank = 0; rank < plan.world_size; ++rank) log.update(rank).NotTorn();
  return RunOnDevices(devices, "complete the step of the daemon before", std::move(rest));
}

absl::Status CompleteSnapshot(const ShardPlan& plan, const SlabPointers& slabs, char* snapshot, bool in_copies,
                              bool behind_pass) {
  if (in_copies && !behind_pass) SHARDD_RETURN_IF_ERROR(MakeCopies(plan, slabs, slabs.shards));
  const KeptPart part = in_copies ? KeptPart::kStates : behind_pass ? KeptPart::kBehindPass : KeptPart::kAll;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    SHARDD_RETURN_IF_ERROR(RunHere(KeepOps(plan, slabs, snapshot, /*back=*/false, rank, part)));
  }
  return absl::OkStatus();
}

void DropHost(const char* name, JobMemory::Kept* kept) {
  const auto it = kept->find(name);
  if (it == kept->end()) return;
  struct stat object {};
  if (fstat(it->second.get(), &object) == 0) {
    (void)fallocate(it->second.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, object.st_size);
  }
  kept->erase(it);
}

absl::Status MakeCopies(const ShardPlan& plan, SlabPointers slabs, char* snapshot) {
  slabs.shards = snapshot;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    SHARDD_RETURN_IF_ERROR(RunHere(CommitOps(plan, slabs, rank)));
  }
  return absl::OkStatus();
}

absl::Status MakeCopiesOnGpus(const ShardPlan& plan, const JobMemory& memory, bool second,
                              const std::vector<Device*>& devices) {
  SlabPointers from = memory.pointers();
  from.shards = memory.kept()->At(second ? plan.memory.snapshot_bytes : 0);
  std::vector<std::vector<DeviceOp>> by_rank;
  for (int rank = 0; rank < plan.world_size; ++rank) by_rank.push_back(CommitOps(plan, from, rank));
  return RunOnDevices(devices, "make the copies that passes read", std::move(by_rank));
}

absl::Status TakeBackLoadedValues(const ShardPlan& plan, const JobMemory& memory, std::optional<uint64_t> version,
                                  const std::vector<Device*>& devices) {
  UndoSlab* const undo = memory.undo();
  if (undo == nullptr) return absl::OkStatus();
  if (version.has_value() && undo->Has(*version)) {
    for (bool more = true; more;) SHARDD_RETURN_IF_ERROR(undo->PutBack(*version, &more));
    std::vector<std::vector<DeviceOp>> by_rank;  // the copies in another dtype, too
    for (int rank = 0; rank < plan.world_size; ++rank) by_rank.push_back(CommitOps(plan, memory.pointers(), rank));
    const bool here = memory.shards()->on_host();
    if (!here) {
      SHARDD_RETURN_IF_ERROR(RunOnDevices(devices, "take back values that were loaded", std::move(by_rank)));
    }
    for (size_t rank = 0; here && rank < by_rank.size(); ++rank) {
      SHARDD_RETURN_IF_ERROR(RunHere(by_rank[rank]));
    }
  }
  for (bool more = undo->bytes() > 0; more;) undo->Forget(&more);
  return absl::OkStatus();
}

}  // namespace shardd
