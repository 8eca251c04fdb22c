#include "server/daemon/take_up/taken_up_job.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/pass_copies.h"
#include "common/process/process_stat.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/daemon/take_up/mapped_slabs.h"
#include "server/daemon/take_up/same_gpus.h"
#include "server/daemon/take_up/unfinished.h"
#include "server/device/device.h"
#include "server/device/device_op.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/job_slab.h"
#include "server/storage/kept_formats.h"
#include "server/storage/kept_pieces.h"

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
  facts.generation = record.generation();
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
  decided.set_generation(record.generation());
  return decided;
}

// Who had sessions of the daemon before, and lives. Nothing: nobody knows of some of them.
std::optional<std::vector<PastProcess>> FormerProcesses(const TakeUpLog& log, int ranks) {
  std::vector<PastProcess> former;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::optional<TakeUpLog::Process> last = log.process(rank);
    if (!last.has_value()) continue;
    if (last->pid == 0) return std::nullopt;
    UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, last->pid, 0)));
    if (!process.valid() && errno == ESRCH) continue;
    if (!process.valid()) return std::nullopt;
    const std::optional<ProcessStat> now = ReadProcessStat(last->pid);
    if (HasEnded(process, last->pid) || (now.has_value() && now->start_ticks != last->start_ticks)) continue;
    if (!now.has_value()) return std::nullopt;
    former.push_back({rank, last->pid, last->uid, std::move(process)});
  }
  return former;
}

// Memory of the job, as the daemon before has left it. `anew`: but for what is to be made of the snapshot.
absl::StatusOr<std::unique_ptr<JobMemory>> TakeUpOnGpus(const ShardPlan& plan, const v1::CustodyJob& job,
                                                        JobMemory::Kept kept, const SlabPlace& place, bool anew) {
  SHARDD_RETURN_IF_ERROR(CheckAllKept(job.slabs_on_gpus(), kept));
  if (anew) {
    const auto drop = [&](const char* name) {
      DropPieces(name, job.slabs_on_gpus(), &kept);
      DropHost(name, &kept);  // with offload
    };
    drop("shards");
    // A daemon's moments are no trainer's.
    const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
    if (in_trainers) drop("optimizer");
  }
  return JobMemory::TakeUp(plan, job.spec().name(), std::move(kept), place, job.slabs_on_gpus());
}

absl::Status CompleteStepOf(const ShardPlan& plan, const v1::DecidedStepRecord& step, const JobMemory& memory,
                            const TakeUpLog& log, bool written, const std::vector<Device*>& devices) {
  return IsOffloaded(plan) ? CompleteStep(plan, step, memory.pointers(), log, written)
                           : CompleteStepOnGpus(plan, step, memory, log, devices);
}

// The snapshot is of that step from here on, as soon as it is taken.
absl::Status BeginSnapshotOf(const v1::DecidedStepRecord& step, const TakeUpLog::Header& header, TakeUpLog* log) {
  const CommittedFacts facts = FactsAfter(step, header);
  v1::CommittedRecord record;
  record.mutable_step_counts()->Add(facts.step_counts.begin(), facts.step_counts.end());
  for (const std::string& state : facts.trainer_states) record.add_trainer_states(state);
  record.set_generation(facts.generation);
  return log->Commit(record, header, TakeUpLog::Counts::kSnapshotBeingTaken);
}

// A log that says so of a plan that has none is of another job, or torn.
absl::Status NoSnapshot() { return absl::DataLossError("its values are in a snapshot, and its plan has none"); }

// `step`: what comes first, with the header behind it; null: nothing does.
absl::Status CompleteSnapshotOnGpus(const ShardPlan& plan, const v1::CustodyJob& job, const JobMemory::Kept& kept,
                                    const TakeUpOn& on, const v1::DecidedStepRecord* step,
                                    const TakeUpLog::Header& header, TakeUpLog* log) {
  SHARDD_ASSIGN_OR_RETURN(JobMemory::Kept copies, DuplicateKept(kept));
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<JobMemory> memory,
                          TakeUpOnGpus(plan, job, std::move(copies), on.place(plan.world_size), /*anew=*/false));
  if (step != nullptr) {
    SHARDD_RETURN_IF_ERROR(CompleteStepOf(plan, *step, *memory, *log, /*written=*/false, on.devices));
    SHARDD_RETURN_IF_ERROR(BeginSnapshotOf(*step, header, log));
  }
  const JobSlab* const snapshot = plan.memory.kept_bytes > 0 ? memory->kept() : memory->parameters();
  if (snapshot == nullptr) return NoSnapshot();
  std::vector<std::vector<DeviceOp>> by_rank;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    by_rank.push_back(KeepOps(plan, memory->pointers(), snapshot->At(0), /*back=*/false, rank));
  }
  SHARDD_RETURN_IF_ERROR(RunOnDevices(on.devices, "complete the snapshot of the daemon before", std::move(by_rank)));
  log->SnapshotTaken();
  return absl::OkStatus();
}

}  // namespace

bool OutlivesDaemon(const ShardPlan& plan) {
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  return !in_trainers || (plan.config.pass_copies() && !plan.config.trainers_never_write());
}

v1::KeptFormats TakenUpJob::formats() const {
  return KeptFormatsOf(static_cast<int>(job.format()), journal->format(), log->format());
}

namespace {

// Whether a rank's update of the step may have changed anything: only a step that was decided has one.
bool HasBegun(const TakeUpLog& log, int ranks, int64_t step) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (log.update(rank).is_of(step)) return true;
  }
  return false;
}

absl::Status Named(const std::string& name, const absl::Status& status) {
  return status.ok() ? status : absl::Status(status.code(), absl::StrCat("\"", name, "\": ", status.message()));
}

}  // namespace

struct LeftJob::State {
  TakenUpJob result;
  JobMemory::Kept kept;
  SlabPlace place;
  TakeUpLog::Left left;
  absl::StatusOr<v1::DecidedStepRecord> decided = absl::NotFoundError("not read");
  bool two = false;  // snapshots: the other one is of that step
  bool completes = false, in_snapshot = false, completes_snapshot = false;

  absl::Status Read(const TakeUpOn& on);
  absl::StatusOr<TakenUpJob> TakeUp(const TakeUpOn& on);
};

absl::Status LeftJob::State::Read(const TakeUpOn& on) {
  SHARDD_RETURN_IF_ERROR(CheckFormat("record of the job", static_cast<int>(result.job.format()), kCustodyFormats));
  SHARDD_ASSIGN_OR_RETURN(result.plan, PlanShards(result.job.spec(), result.job.node()));
  const ShardPlan& plan = result.plan;
  place = on.place(plan.world_size);
  SHARDD_RETURN_IF_ERROR(CheckSameGpus(result.job, place));
  if (plan.digest != result.job.plan_digest() || !OutlivesDaemon(plan)) {
    return absl::FailedPreconditionError(
        "this version of shardd plans the job otherwise than the one that made it; start that version");
  }
  const TakeUpLog::Sizes sizes = TakeUpLog::SizesFor(plan);
  SHARDD_ASSIGN_OR_RETURN(result.journal, Journal::TakeUp(TakeKept(kept, kCustodyJournalName), sizes.place_bytes));
  SHARDD_ASSIGN_OR_RETURN(result.log, TakeUpLog::TakeUp(TakeKept(kept, kCustodyLogName), sizes));
  SHARDD_ASSIGN_OR_RETURN(left, result.log->Read());
  TakeUpLog::Header& header = left.header;
  if (header.version == 0) return absl::NotFoundError("nothing was committed");
  // Before anything is changed. What is decided in an epoch completes in it. With pass_copies a step that changes
  // shards is one when its snapshot is taken, and any other is the snapshot's.
  decided = result.journal->ReadDecided(header.step + 1);
  const bool pass_copies = plan.config.pass_copies();
  two = plan.memory.kept_bytes > plan.memory.snapshot_bytes;
  completes = decided.ok() && decided->epoch() == header.epoch && (DaemonUpdates(plan) || !pass_copies || two);
  if (left.touched && (pass_copies || !completes)) {
    return absl::DataLossError("the daemon had not written down what it committed last, as its log says");
  }
  if (left.shards_in_copies && (place.memory != nullptr || !PassesReadWhatIsStored(plan))) {
    return absl::DataLossError("its log says that passes read the snapshot's shards, and they do not");
  }
  const bool shards_count = !pass_copies && left.counts == TakeUpLog::Counts::kShards;
  if (shards_count && !decided.ok() && HasBegun(*result.log, plan.world_size, header.step + 1)) {
    return absl::DataLossError(absl::StrCat(decided.status().message(), ", whose update had begun"));
  }
  in_snapshot = (two || completes) ? pass_copies : left.counts != TakeUpLog::Counts::kShards;
  completes_snapshot = !two && in_snapshot && (completes || left.counts == TakeUpLog::Counts::kSnapshotBeingTaken);
  if (completes) {
    ++header.step;
    ++header.version;
  }
  return absl::OkStatus();
}

absl::StatusOr<TakenUpJob> LeftJob::State::TakeUp(const TakeUpOn& on) {
  const ShardPlan& plan = result.plan;
  const TakeUpLog::Header& header = left.header;
  const bool pass_copies = plan.config.pass_copies();
  const bool on_gpus = place.memory != nullptr;
  result.living = FormerProcesses(*result.log, plan.world_size).value_or(std::vector<PastProcess>());
  MappedSlabs mapped;
  bool gradients_stay = false;
  if (!on_gpus || IsOffloaded(plan)) {
    SHARDD_ASSIGN_OR_RETURN(mapped, MapSlabs(plan, kept, in_snapshot));
  }
  if (on_gpus) {
    mapped = MappedSlabs();  // all is there
    SHARDD_RETURN_IF_ERROR(result.log->PinFor(place));
    if (completes_snapshot) {
      SHARDD_RETURN_IF_ERROR(CompleteSnapshotOnGpus(plan, result.job, kept, on, completes ? &*decided : nullptr, header,
                                                    result.log.get()));
    }
    auto former = FormerProcesses(*result.log, plan.world_size);
    SHARDD_ASSIGN_OR_RETURN(result.memory, TakeUpOnGpus(plan, result.job, std::move(kept), place,
                                                        /*anew=*/in_snapshot && !former.has_value()));
    gradients_stay = !former.has_value() && result.memory->gradients() != nullptr;
    if (former.has_value()) result.former = *std::move(former);
  }
  const SlabPointers slabs = on_gpus ? result.memory->pointers()
                                     : SlabPointers{mapped.At("shards"), mapped.At("parameters"),
                                                    mapped.At("gradients"), mapped.At("optimizer")};
  absl::StatusOr<v1::DecidedStepRecord> last = completes ? decided : absl::StatusOr<v1::DecidedStepRecord>();
  if (completes) {
    // Parts of a step that is completed have made no cast copies.
    const bool written = !pass_copies && (left.touched || left.counts != TakeUpLog::Counts::kShards ||
                                          HasSeveralOptimizers(plan.config.optimizer()));
    if (two) {
      left.second = !left.second;
    } else if (!on_gpus) {
      SHARDD_RETURN_IF_ERROR(CompleteStep(plan, *decided, slabs, *result.log, written));
    } else if (!pass_copies) {
      SHARDD_RETURN_IF_ERROR(CompleteStepOf(plan, *decided, *result.memory, *result.log, written, on.devices));
    }  // else it was there before the snapshot
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
    result.committed.generation = left.facts.generation();
  }
  if (result.committed.step_counts.size() != plan.params.size() ||
      result.committed.trainer_states.size() != static_cast<size_t>(plan.world_size)) {
    return absl::DataLossError("what is committed is of another plan");
  }
  for (int rank = 0; rank < plan.world_size; ++rank) result.committed.finished.push_back(result.log->finished(rank));
  ++result.committed.epoch;  // all sessions are over
  // A snapshot has what trainers write, and of a daemon's optimizer they write values that are loaded.
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const std::optional<uint64_t> undone =
      completes || (in_snapshot && in_trainers) ? std::nullopt : std::optional(header.version);
  // Replicas on GPUs keep no promise, and are sent what they lack.
  const bool keeps_promises = !completes && (!on_gpus || plan.cut_over_nodes);
  // Old bytes of promised values stay, too: where parameters are cut over nodes nobody could send what was agreed on.
  const bool keeps_values = left.promised_values.has_value() && keeps_promises && (!in_snapshot || two);
  // Likewise of a promised step's parts, which are committed with it or put back with the attempt.
  const bool keeps_parts = left.promised.has_value() && left.promised->parts() > 0 && !on_gpus && !completes;
  if (left.promised.has_value() && keeps_promises) {
    const bool counts_fit = !keeps_parts || left.promised->step_counts_size() == static_cast<int>(plan.params.size());
    if (left.promised->trainer_states_size() != plan.world_size || !counts_fit) {
      return absl::DataLossError("what is promised is of another plan");
    }
    result.node.promised_parts = keeps_parts;
    result.node.promised_in = left.promised->generation();
    result.committed.promised = *std::move(left.promised);
  }
  if (keeps_values) {
    const int states = left.promised_values->trainer_states_size();  // of a pass alone
    if (left.promised_values->step_counts_size() != static_cast<int>(plan.params.size()) ||
        (states != 0 && states != plan.world_size)) {
      return absl::DataLossError("what values are promised is of another plan");
    }
    result.node.promised_in = left.promised_values->generation();
    result.node.promised_values = true;
    result.committed.promised_values = *std::move(left.promised_values);
  }
  if (on_gpus) {
    if (!keeps_values) SHARDD_RETURN_IF_ERROR(TakeBackLoadedValues(plan, *result.memory, undone, on.devices));
    result.committed.gradients_stay = gradients_stay;
    result.committed.in_snapshot = in_snapshot;
    if (in_snapshot && two) {
      result.committed.second_snapshot = left.second;
      SHARDD_RETURN_IF_ERROR(MakeCopiesOnGpus(plan, *result.memory, left.second, on.devices));
    }
    return std::move(result);
  }
  // Its pages go first, so that both take no more than one.
  const auto make_anew = [&](const char* name) {
    if (const auto it = mapped.by_name.find(name); it != mapped.by_name.end()) it->second->Discard();
    kept.erase(name);
  };
  // Those who may write them are known, or else whoever attaches first finds them renewed, behind a promise.
  if (auto former = FormerProcesses(*result.log, plan.world_size); former.has_value()) {
    result.former = *std::move(former);
  } else if (result.committed.promised.has_value()) {
    result.committed.gradients_stay = true;
  } else {
    make_anew("gradients");
  }
  result.committed.in_snapshot = in_snapshot;
  if (in_snapshot) {
    char* const first = mapped.At(plan.memory.kept_bytes > 0 ? "snapshot" : "parameters");
    if (first == nullptr) return NoSnapshot();
    if (two) {
      result.committed.second_snapshot = left.second;
      // What passes read may have been on its way to the other one.
      char* const snapshot = first + (left.second ? plan.memory.snapshot_bytes : 0);
      SHARDD_RETURN_IF_ERROR(MakeCopies(plan, slabs, snapshot));
    } else if (completes) {
      SHARDD_RETURN_IF_ERROR(BeginSnapshotOf(*decided, header, result.log.get()));
    }
    const bool may_be_in_copies = SnapshotMayBeInCopies(plan) && result.log->may_say_in_copies();
    result.committed.shards_in_copies = completes_snapshot ? may_be_in_copies : left.shards_in_copies;
    if (completes_snapshot) {
      SHARDD_RETURN_IF_ERROR(CompleteSnapshot(plan, slabs, first, may_be_in_copies, left.behind_pass && !completes));
      result.log->SnapshotTaken(result.committed.shards_in_copies);
    }
    make_anew("shards");
    if (in_trainers) make_anew("optimizer");  // a daemon's moments are no trainer's
  }
  SHARDD_ASSIGN_OR_RETURN(result.memory, JobMemory::TakeUp(plan, result.job.spec().name(), std::move(kept)));
  if (!keeps_values && !keeps_parts)
    SHARDD_RETURN_IF_ERROR(TakeBackLoadedValues(plan, *result.memory, undone, on.devices));
  for (int rank = 0; result.memory->rank_slots() != nullptr && rank < plan.world_size; ++rank) {
    const TakeUpLog::Process last = result.log->process(rank).value_or(TakeUpLog::Process());
    result.memory->rank_slots()->SetProcess(rank, {last.pid, last.start_ticks});
  }
  return std::move(result);
}

LeftJob::LeftJob(std::unique_ptr<State> state) : state_(std::move(state)) {}
LeftJob::LeftJob(LeftJob&&) noexcept = default;
LeftJob& LeftJob::operator=(LeftJob&&) noexcept = default;
LeftJob::~LeftJob() = default;

const TakenUpJob& LeftJob::job() const { return state_->result; }
const TakeUpLog::Header& LeftJob::committed() const { return state_->left.header; }
int64_t LeftJob::planned_bytes() const {
  return PlannedHostBytes(state_->result.plan, state_->place, /*outlives=*/true);
}

absl::StatusOr<LeftJob> LeftJob::Read(JobMemory::Kept kept, const TakeUpOn& on) {
  UniqueFd record = TakeKept(kept, kCustodyJobName);
  if (!record.valid()) return absl::NotFoundError("it was being opened");
  auto state = std::make_unique<State>();
  SHARDD_RETURN_IF_ERROR(ReadCustodyRecord(kCustodyJobName, std::move(record), &state->result.job));
  state->kept = std::move(kept);
  SHARDD_RETURN_IF_ERROR(Named(state->result.job.spec().name(), state->Read(on)));
  return LeftJob(std::move(state));
}

absl::StatusOr<TakenUpJob> LeftJob::TakeUp(const TakeUpOn& on) {
  const std::unique_ptr<State> state = std::move(state_);
  const std::string name = state->result.job.spec().name();
  absl::StatusOr<TakenUpJob> taken = state->TakeUp(on);
  if (taken.ok()) return taken;
  return Named(name, taken.status());
}

absl::StatusOr<TakenUpJob> ReadTakenUpJob(JobMemory::Kept kept, const TakeUpOn& on) {
  SHARDD_ASSIGN_OR_RETURN(LeftJob left, LeftJob::Read(std::move(kept), on));
  return left.TakeUp(on);
}

}  // namespace shardd
