#include "server/daemon/job_custody.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/observe/log.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/record_place.h"

namespace shardd {
namespace {

constexpr uint32_t kCustodyFormat = 1;
constexpr char kJobName[] = "job";
constexpr char kJournalName[] = "journal";
constexpr char kLogName[] = "take-up log";
constexpr char kSaltName[] = "secret salt";

// Memory that holds one record, and nothing else.
absl::StatusOr<std::unique_ptr<Slab>> MakeRecord(const char* name, const google::protobuf::MessageLite& record) {
  const int64_t size_bytes = kRecordHeadBytes + static_cast<int64_t>(record.ByteSizeLong());
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::Create(name, SlabBacking::kSealedMemfd, size_bytes));
  SHARDD_RETURN_IF_ERROR(WriteRecord(slab->At<char>(0), size_bytes, record));
  return slab;
}

absl::Status ReadRecordOf(const char* name, UniqueFd fd, google::protobuf::MessageLite* record) {
  struct stat object {};
  if (fstat(fd.get(), &object) != 0) object.st_size = 0;
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, Slab::TakeUp(name, std::move(fd), object.st_size));
  return ReadRecord(slab->At<char>(0), slab->size_bytes(), record)
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat("\"", name, "\" is not valid"));
}

UniqueFd Take(JobMemory::Kept& kept, const char* name) {
  const auto it = kept.find(name);
  return it == kept.end() ? UniqueFd() : std::move(it->second);
}

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

// Completes the update that the record describes, whatever of it was done: the daemon that made it was killed.
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

}  // namespace

bool JobCustody::Keeps(const ShardPlan& plan) {
  return plan.nodes() == 1 && !plan.config.pass_copies() &&
         plan.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER && !IsOffloaded(plan);
}

absl::Status JobCustody::HandOver(JobCore::Init* init) const {
  if (custody_ == nullptr || !Keeps(*init->plan) || init->memory->place().memory != nullptr) {
    return absl::OkStatus();
  }
  const auto put = [custody = custody_, id = init->id](const std::string& name, int fd) {
    const absl::Status status = custody->Put(id, name, fd);
    return status.ok() ? status
                       : absl::Status(status.code(), absl::StrCat("hand over \"", name, "\": ", status.message()));
  };
  if (init->take_up_log == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(init->take_up_log,
                            TakeUpLog::Create(init->plan->memory.journal_bytes / 2, init->plan->world_size));
    v1::CustodyJob job;
    job.set_format(kCustodyFormat);
    job.set_job_id(init->id);
    job.set_owner_uid(init->owner.uid);
    if (init->owner.secret.has_value()) {
      job.set_secret_digest(init->owner.secret->data(), init->owner.secret->size());
    }
    *job.mutable_spec() = init->spec;
    job.set_plan_digest(init->plan->digest);
    SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> record, MakeRecord(kJobName, job));
    SHARDD_RETURN_IF_ERROR(put(kJournalName, init->journal->fd()));
    SHARDD_RETURN_IF_ERROR(put(kLogName, init->take_up_log->fd()));
    SHARDD_RETURN_IF_ERROR(put(kJobName, record->fd()));
  }
  return init->memory->KeepBy(put);
}

absl::StatusOr<TakenUpJob> JobCustody::Read(JobMemory::Kept kept) {
  TakenUpJob result;
  SHARDD_RETURN_IF_ERROR(ReadRecordOf(kJobName, Take(kept, kJobName), &result.job));
  if (result.job.format() != kCustodyFormat) {
    return absl::DataLossError(
        absl::StrCat("it is of another version (got format ", result.job.format(), ", want ", kCustodyFormat, ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(result.plan, PlanShards(result.job.spec()));
  const ShardPlan& plan = result.plan;
  if (plan.digest != result.job.plan_digest() || !Keeps(plan)) {
    return absl::DataLossError("this version plans the job otherwise than the one that made it");
  }
  const int64_t place_bytes = plan.memory.journal_bytes / 2;
  SHARDD_ASSIGN_OR_RETURN(result.journal, Journal::TakeUp(Take(kept, kJournalName), place_bytes));
  SHARDD_ASSIGN_OR_RETURN(result.log, TakeUpLog::TakeUp(Take(kept, kLogName), place_bytes, plan.world_size));
  SHARDD_ASSIGN_OR_RETURN(TakeUpLog::Left left, result.log->Read());
  TakeUpLog::Header& header = left.header;
  if (header.version == 0) return absl::NotFoundError("nothing was committed");
  // Before anything is changed. What is decided in an epoch completes in it.
  const absl::StatusOr<v1::DecidedStepRecord> decided = result.journal->ReadDecided(header.step + 1);
  const bool completes = decided.ok() && decided->epoch() == header.epoch;
  if (left.touched && !completes) {
    return absl::DataLossError(
        "the daemon ended while values were being written, and nobody knows which of them are there");
  }
  absl::StatusOr<v1::DecidedStepRecord> last = completes ? decided : absl::StatusOr<v1::DecidedStepRecord>();
  if (completes) {
    SlabPointers slabs;
    std::vector<std::unique_ptr<Slab>> mapped;
    const auto map = [&](const char* name, int64_t size_bytes) -> absl::StatusOr<char*> {
      if (size_bytes == 0) return nullptr;
      UniqueFd copy(fcntl(kept[name].get(), F_DUPFD_CLOEXEC, 0));
      SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::TakeUp(name, std::move(copy), size_bytes));
      mapped.push_back(std::move(slab));
      return mapped.back()->At<char>(0);
    };
    SHARDD_ASSIGN_OR_RETURN(slabs.shards, map("shards", plan.memory.shards_bytes));
    SHARDD_ASSIGN_OR_RETURN(slabs.parameters, map("parameters", plan.memory.parameters_bytes));
    SHARDD_ASSIGN_OR_RETURN(slabs.gradients, map("gradients", plan.memory.gradients_bytes));
    SHARDD_ASSIGN_OR_RETURN(slabs.optimizer, map("optimizer", plan.memory.optimizer_bytes));
    SHARDD_RETURN_IF_ERROR(CompleteStep(plan, *decided, slabs, *result.log, left.touched));
    ++header.step;
    ++header.version;
  } else if (left.facts_in_journal) {
    last = result.journal->ReadDecided(header.step);
    if (!last.ok()) return absl::DataLossError(last.status().message());
  }
  if (last.ok()) {
    result.committed = FactsAfter(*last, header);
  } else {
    result.committed = {header.epoch, header.version, header.step, {}, {}, {}};
    result.committed.step_counts.assign(left.facts.step_counts().begin(), left.facts.step_counts().end());
    result.committed.trainer_states.assign(left.facts.trainer_states().begin(), left.facts.trainer_states().end());
  }
  if (result.committed.step_counts.size() != plan.params.size() ||
      result.committed.trainer_states.size() != static_cast<size_t>(plan.world_size)) {
    return absl::DataLossError("what is committed is of another plan");
  }
  ++result.committed.epoch;  // all sessions are over
  kept.erase("gradients");   // trainers of before may still write into them
  SHARDD_ASSIGN_OR_RETURN(result.memory, JobMemory::TakeUp(plan, result.job.spec().name(), std::move(kept)));
  return result;
}

void JobCustody::Review() const {
  if (custody_ != nullptr) custody_->Review();
}

void JobCustody::Drop(uint64_t job) const {
  if (custody_ != nullptr) custody_->Drop(job);
}

std::vector<std::pair<uint64_t, absl::StatusOr<TakenUpJob>>> JobCustody::TakeUp() const {
  std::vector<std::pair<uint64_t, absl::StatusOr<TakenUpJob>>> result;
  if (custody_ == nullptr) return result;
  std::map<uint64_t, JobMemory::Kept> jobs;
  for (auto& [key, fd] : custody_->TakeUp()) jobs[key.first][key.second] = std::move(fd);
  v1::CustodyDaemon own;
  if (UniqueFd salt = Take(jobs[0], kSaltName); salt.valid() && ReadRecordOf(kSaltName, std::move(salt), &own).ok()) {
    UseSecretSalt(own.secret_salt());
  } else {
    own.set_secret_salt(SecretSalt());
    const absl::StatusOr<std::unique_ptr<Slab>> record = MakeRecord(kSaltName, own);
    const absl::Status put = record.ok() ? custody_->Put(0, kSaltName, (*record)->fd()) : record.status();
    if (!put.ok()) LogWarning(absl::StrCat("jobs with a secret end with this daemon: ", put.message()));
  }
  jobs.erase(0);
  for (auto& [id, kept] : jobs) result.emplace_back(id, Read(std::move(kept)));
  return result;
}

}  // namespace shardd
