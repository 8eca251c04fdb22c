#include "server/daemon/taken_up_job.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/record_place.h"

namespace shardd {
namespace {

CommittedFacts FactsAfter(const v1::DecidedStepRecord& record, const TakeUpLog::Header& header) {
  CommittedFacts facts;
  facts.epoch = header.epoch;
  facts.version = header.version;
  facts.step = header.step;
  facts.step_counts.assign(record.step_counts().begin(), record.step_counts().end());
  for (size_t param = 0; param < facts.step_counts.size(); ++param) {
    const size_t byte = param / 8;
    const bool present = byte < record.present().size() && (record.present()[byte] >> (param % 8) & 1) != 0;
    facts.step_counts[param] += present ? 1 : 0;
  }
  facts.trainer_states.assign(record.trainer_states().begin(), record.trainer_states().end());
  return facts;
}

// As node 0 said it, or said to others.
v1::PeerMessage::Decided DecisionOf(const v1::DecidedStepRecord& record) {
  v1::PeerMessage::Decided decided;
  decided.set_step(record.step());
  decided.set_grad_norm(record.grad_norm());
  decided.set_clip_factor(record.step_clip_factor());
  decided.set_skipped(record.skipped());
  decided.set_present(record.present());
  return decided;
}

// The job's slabs, mapped for this thread.
struct MappedSlabs {
  std::map<std::string, std::unique_ptr<Slab>> by_name;
  char* At(const char* name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second->At<char>(0);
  }
};

// Of all that was handed over, with the sizes of the plan. DATA_LOSS: some of it is not there.
absl::StatusOr<MappedSlabs> MapSlabs(const ShardPlan& plan, const JobMemory::Kept& kept, bool snapshot) {
  const std::pair<const char*, int64_t> wanted[] = {{"shards", plan.memory.shards_bytes},
                                                    {"parameters", plan.memory.parameters_bytes},
                                                    {"gradients", plan.memory.gradients_bytes},
                                                    {"optimizer", plan.memory.optimizer_bytes},
                                                    {"snapshot", snapshot ? plan.memory.kept_bytes : 0}};
  MappedSlabs mapped;
  for (const auto& [name, size_bytes] : wanted) {
    if (size_bytes == 0) continue;
    const auto it = kept.find(name);
    if (it == kept.end()) {
      return absl::DataLossError(
          absl::StrCat("its \"", name, "\" is not there: the custodian or the daemon ended while it was handed over"));
    }
    UniqueFd copy(fcntl(it->second.get(), F_DUPFD_CLOEXEC, 0));
    SHARDD_ASSIGN_OR_RETURN(mapped.by_name[name], Slab::TakeUp(name, std::move(copy), size_bytes));
  }
  return mapped;
}

// Completes the update that the record describes, whatever of it was done: the daemon that made it was killed.
// `written`: trainers had handed in beside it.
absl::Status CompleteStep(const ShardPlan& plan, const v1::DecidedStepRecord& record, const SlabPointers& slabs,
                          const TakeUpLog& log, bool written) {
  DecidedStep step;
  step.groups.assign(record.groups().begin(), record.groups().end());
  step.clip_factor = record.clip_factor();
  step.step_counts.assign(record.step_counts().begin(), record.step_counts().end());
  if (step.step_counts.size() != plan.params.size() || record.present().size() * 8 < plan.params.size()) {
    return absl::DataLossError(absl::StrCat("the record of step ", record.step(), " is of another plan"));
  }
  for (size_t param = 0; param < plan.params.size(); ++param) {
    step.present.push_back((record.present()[param / 8] >> (param % 8) & 1) != 0);
  }
  for (int rank = 0; rank < plan.world_size; ++rank) {
    UpdateLog& update = log.update(rank);
    if (!update.is_of(record.step())) update.Begin(record.step());
    std::vector<DeviceOp> ops = UpdateOps(plan, slabs, step, rank, &update);
    if (written) {
      for (DeviceOp& op : CommitOps(plan, slabs, rank)) ops.push_back(std::move(op));
    }
    for (const DeviceOp& op : ops) {
      SHARDD_RETURN_IF_ERROR(CheckCpuOp(op));
      CompleteCpuOp(op, record.step());
    }
  }
  return absl::OkStatus();
}

absl::Status CompleteSnapshot(const ShardPlan& plan, const SlabPointers& slabs, char* snapshot) {
  for (int rank = 0; rank < plan.world_size; ++rank) {
    for (const DeviceOp& op : KeepOps(plan, slabs, snapshot, /*back=*/false, rank)) {
      SHARDD_RETURN_IF_ERROR(CheckCpuOp(op));
      CompleteCpuOp(op, /*step=*/0);
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool OutlivesDaemon(const ShardPlan& plan) {
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  return !IsOffloaded(plan) && plan.config.pass_copies() == in_trainers &&
         !(in_trainers && plan.config.trainers_never_write());
}

TakeUpLog::Sizes TakeUpLogSizes(const ShardPlan& plan) {
  return {plan.memory.journal_bytes / 2, plan.world_size, /*promises=*/plan.nodes() > 1};
}

absl::StatusOr<std::unique_ptr<Slab>> MakeCustodyRecord(const char* name, const google::protobuf::MessageLite& record) {
  const int64_t size_bytes = kRecordHeadBytes + static_cast<int64_t>(record.ByteSizeLong());
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::Create(name, SlabBacking::kSealedMemfd, size_bytes));
  SHARDD_RETURN_IF_ERROR(WriteRecord(slab->At<char>(0), size_bytes, record));
  return slab;
}

absl::Status ReadCustodyRecord(const char* name, UniqueFd fd, google::protobuf::MessageLite* record) {
  struct stat object {};
  if (fstat(fd.get(), &object) != 0) object.st_size = 0;
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, Slab::TakeUp(name, std::move(fd), object.st_size));
  return ReadRecord(slab->At<char>(0), slab->size_bytes(), record)
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat("\"", name, "\" is not valid"));
}

UniqueFd TakeKept(JobMemory::Kept& kept, const char* name) {
  const auto it = kept.find(name);
  return it == kept.end() ? UniqueFd() : std::move(kept.extract(it).mapped());
}

absl::StatusOr<TakenUpJob> ReadTakenUpJob(JobMemory::Kept kept) {
  TakenUpJob result;
  UniqueFd job = TakeKept(kept, kCustodyJobName);
  if (!job.valid()) return absl::NotFoundError("it was being opened");
  SHARDD_RETURN_IF_ERROR(ReadCustodyRecord(kCustodyJobName, std::move(job), &result.job));
  if (result.job.format() != kCustodyFormat) {
    return absl::DataLossError(
        absl::StrCat("it is of another version (got format ", result.job.format(), ", want ", kCustodyFormat, ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(result.plan, PlanShards(result.job.spec(), result.job.node()));
  const ShardPlan& plan = result.plan;
  if (plan.digest != result.job.plan_digest() || !OutlivesDaemon(plan)) {
    return absl::DataLossError("this version plans the job otherwise than the one that made it");
  }
  const TakeUpLog::Sizes sizes = TakeUpLogSizes(plan);
  SHARDD_ASSIGN_OR_RETURN(result.journal, Journal::TakeUp(TakeKept(kept, kCustodyJournalName), sizes.place_bytes));
  SHARDD_ASSIGN_OR_RETURN(result.log, TakeUpLog::TakeUp(TakeKept(kept, kCustodyLogName), sizes));
  SHARDD_ASSIGN_OR_RETURN(TakeUpLog::Left left, result.log->Read());
  TakeUpLog::Header& header = left.header;
  if (header.version == 0) return absl::NotFoundError("nothing was committed");
  // Before anything is changed. What is decided in an epoch completes in it. With pass_copies no step is.
  const absl::StatusOr<v1::DecidedStepRecord> decided = result.journal->ReadDecided(header.step + 1);
  const bool completes = decided.ok() && decided->epoch() == header.epoch && !plan.config.pass_copies();
  if (left.touched && !completes) {
    return absl::DataLossError(
        "the daemon ended while values were being written, and nobody knows which of them are there");
  }
  const bool in_snapshot = left.counts != TakeUpLog::Counts::kShards && !completes;
  SHARDD_ASSIGN_OR_RETURN(MappedSlabs mapped, MapSlabs(plan, kept, in_snapshot));
  const SlabPointers slabs{mapped.At("shards"), mapped.At("parameters"), mapped.At("gradients"),
                           mapped.At("optimizer")};
  absl::StatusOr<v1::DecidedStepRecord> last = completes ? decided : absl::StatusOr<v1::DecidedStepRecord>();
  if (completes) {
    const bool written = left.touched || left.counts != TakeUpLog::Counts::kShards;
    SHARDD_RETURN_IF_ERROR(CompleteStep(plan, *decided, slabs, *result.log, written));
    ++header.step;
    ++header.version;
  } else if (left.facts_in_journal) {
    last = result.journal->ReadDecided(header.step);
    if (!last.ok()) return absl::DataLossError(last.status().message());
  }
  if (const auto of_step = result.journal->ReadDecided(header.step); of_step.ok()) {
    result.node.decided = DecisionOf(*of_step);  // also where another daemon has taken the job up since
  }
  if (last.ok()) {
    result.committed = FactsAfter(*last, header);
  } else {
    result.committed = {header.epoch, header.version, header.step, {}, {}, {}, false};
    result.committed.step_counts.assign(left.facts.step_counts().begin(), left.facts.step_counts().end());
    result.committed.trainer_states.assign(left.facts.trainer_states().begin(), left.facts.trainer_states().end());
  }
  if (result.committed.step_counts.size() != plan.params.size() ||
      result.committed.trainer_states.size() != static_cast<size_t>(plan.world_size)) {
    return absl::DataLossError("what is committed is of another plan");
  }
  result.committed.finished = left.finished;
  ++result.committed.epoch;  // all sessions are over
  // Of what is made anew the pages go first, so that both take no more than one.
  const auto make_anew = [&](const char* name) {
    if (const auto it = mapped.by_name.find(name); it != mapped.by_name.end()) it->second->Discard();
    kept.erase(name);
  };
  if (left.promised.has_value() && !completes) {
    if (left.promised->trainer_states_size() != plan.world_size) {
      return absl::DataLossError("what is promised is of another plan");
    }
    result.node.promised_in = left.promised->generation();
    result.committed.promised = *std::move(left.promised);
  } else if (!RankSlots::LastProcesses(kept, plan.world_size).has_value()) {
    make_anew("gradients");
  }
  result.committed.in_snapshot = in_snapshot;
  if (in_snapshot) {
    if (left.counts == TakeUpLog::Counts::kSnapshotBeingTaken) {
      SHARDD_RETURN_IF_ERROR(
          CompleteSnapshot(plan, slabs, mapped.At(plan.memory.kept_bytes > 0 ? "snapshot" : "parameters")));
      result.log->SnapshotTaken();
    }
    make_anew("shards");
    // A daemon's moments are no trainer's.
    if (plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER) make_anew("optimizer");
  }
  SHARDD_ASSIGN_OR_RETURN(result.memory, JobMemory::TakeUp(plan, result.job.spec().name(), std::move(kept)));
  return result;
}

}  // namespace shardd
