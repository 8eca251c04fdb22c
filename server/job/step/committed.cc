#include "server/job/step/committed.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/process/kept_write.h"
#include "server/device/device_op.h"
#include "server/job/work/optimizer_devices.h"
#include "server/observe/log.h"
#include "server/storage/journal.h"
#include "server/storage/take_up_log.h"

namespace shardd {

Committed::Committed(std::string job, int params, int ranks, std::unique_ptr<Journal> journal)
    : job_(std::move(job)),
      journal_(std::move(journal)),
      step_counts_(std::make_shared<std::vector<int64_t>>(static_cast<size_t>(params), 0)),
      trainer_states_(static_cast<size_t>(ranks)) {}

void Committed::TakeOver(const CommittedFacts& facts) {
  epoch_ = facts.epoch;
  version_ = facts.version;
  generation_ = facts.generation;
  step_ = facts.step;
  SetStepCounts(facts.step_counts);
  trainer_states_ = facts.trainer_states;
  if ((facts.promised.has_value() || facts.promised_values.has_value()) && logs_) log_->KeepPromise();
  second_snapshot_ = facts.second_snapshot;
  if (facts.in_snapshot && !second_snapshot_.has_value()) {
    GoBack(step_, facts.trainer_states);
  } else {
    WriteHeader(Changed::kFacts);
  }
}

void Committed::KeepIn(std::unique_ptr<TakeUpLog> log) {
  log_ = std::move(log);
  logs_ = log_ != nullptr;
}

UpdateLog* Committed::BeginUpdate(int rank) {
  if (log_ == nullptr) return nullptr;
  UpdateLog& update = log_->update(rank);
  AtKeptWrite();
  update.Begin(step_ + 1);
  AtKeptWrite();
  return &update;
}

void Committed::LogByPart(int rank, std::vector<DeviceOp>* parts, int count) {
  if (log_ == nullptr || count == 1) return;
  shardd::LogByPart(
      parts, count, [&](int part) -> UpdateLog& { return log_->update(rank, part); },
      [&](UpdateLog& log, int64_t first) { log.Begin(step_ + 1, first, count); });
}

void Committed::EndCustody() {
  if (log_ != nullptr) log_->End();
  custody_ended_ = log_ != nullptr;
  logs_ = false;
}

void Committed::CountSnapshot(int64_t step, const std::vector<std::string>& trainer_states) {
  LogSnapshot({version_, step, {}}, trainer_states, TakeUpLog::Counts::kSnapshot);
}

void Committed::BeginSnapshot(const SnapshotOf& of, const std::vector<std::string>& trainer_states) {
  shards_count_ = false;
  LogSnapshot(of, trainer_states, TakeUpLog::Counts::kSnapshotBeingTaken);
}

bool Committed::snapshot_may_be_in_copies() const { return log_ == nullptr || log_->may_say_in_copies(); }

void Committed::SnapshotTaken(bool shards_in_copies) {
  shards_count_ = false;
  if (logs_) log_->SnapshotTaken(shards_in_copies);
}

void Committed::SnapshotIsBehind() {
  if (logs_) log_->SnapshotIsBehind();
}

void Committed::LogSnapshot(const SnapshotOf& of, const std::vector<std::string>& trainer_states,
                            TakeUpLog::Counts counts) {
  if (!logs_) return;
  if (absl::Status status = LogFacts(of, trainer_states, counts); !status.ok()) {
    log_->Touch();  // what it says is of another snapshot
    LogError(absl::StrCat("job ", job_, ": it would not outlive this daemon: ", status.message()));
  }
}

void Committed::EndLastEpoch() {
  logs_ = false;
  EndEpoch();
}

void Committed::EndEpoch() {
  ++epoch_;
  WriteHeader(Changed::kEpoch);
}

void Committed::Promise(v1::PromisedStepRecord record) {
  if (!logs_) return;
  record.set_step(step_ + 1);
  if (absl::Status status = log_->Promise(record); !status.ok()) {
    LogError(absl::StrCat("job ", job_, ": step ", step_ + 1, " would be lost with this daemon: ", status.message()));
  }
}

void Committed::PromiseValues(uint64_t generation, const std::vector<std::string>& trainer_states) {
  if (!logs_) return;
  v1::PromisedValuesRecord record;
  record.set_generation(generation);
  record.set_version(version_ + 1);
  record.mutable_step_counts()->Add(step_counts_->begin(), step_counts_->end());
  for (const std::string& state : trainer_states) record.add_trainer_states(state);
  if (absl::Status status = log_->PromiseValues(record); !status.ok()) {
    LogError(
        absl::StrCat("job ", job_, ": version ", version_ + 1, " would be lost with this daemon: ", status.message()));
  }
}

void Committed::SetWriting(bool writing) {
  if (logs_) log_->SetWriting(writing);
}

void Committed::Finish() {
  if (logs_) log_->Finish();
}

void Committed::CommitStep(const std::vector<bool>& updated, std::vector<std::string> trainer_states) {
  std::vector<int64_t>& counts = OwnStepCounts();
  for (size_t param = 0; param < updated.size(); ++param) {
    counts[param] += updated[param] ? 1 : 0;
  }
  trainer_states_ = std::move(trainer_states);
  ++step_;
  CommitVersion(&JobPart::StepCommitted, Changed::kStep);
}

void Committed::CommitValues() { CommitVersion(&JobPart::ValuesCommitted, Changed::kFacts); }

void Committed::CommitVersion(void (JobPart::*of)(), Changed what) {
  ++version_;
  generation_ = std::exchange(next_generation_, 0);
  WriteHeader(what);
  if (parts_ != nullptr) {
    if (of != nullptr) (parts_->*of)();
    parts_->VersionCommitted();
  }
}

void Committed::SetTrainerState(int rank, std::string state) {
  trainer_states_[static_cast<size_t>(rank)] = std::move(state);
}

void Committed::GoBack(int64_t step, const std::vector<std::string>& trainer_states) {
  step_ = step;
  trainer_states_ = trainer_states;
  WriteHeader(Changed::kEpoch);
  if (shards_count_) CountSnapshot(step_, trainer_states_);  // until the copy has become a version
}

void Committed::Lose() {
  ++states_that_came_;
  had_parameters_ = had_parameters_ || version_ > 0;
  version_ = generation_ = next_generation_ = 0;
  step_ = 0;
  SetStepCounts(std::vector<int64_t>(step_counts_->size(), 0));
  trainer_states_.assign(trainer_states_.size(), "");
  WriteHeader(Changed::kFacts);
  // A step of a number that was, of another attempt, has not begun here.
  for (size_t rank = 0; logs_ && rank < trainer_states_.size(); ++rank) {
    log_->update(static_cast<int>(rank)).Begin(/*step=*/0);
  }
  journal_->ForgetDecided();
}

void Committed::Restore(int64_t step, uint64_t version, std::vector<int64_t> step_counts,
                        std::vector<std::string> trainer_states, uint64_t generation) {
  ++states_that_came_;
  had_parameters_ = false;
  step_ = step;
  version_ = version;
  generation_ = generation;
  SetStepCounts(std::move(step_counts));
  trainer_states_ = std::move(trainer_states);
  WriteHeader(Changed::kFacts);
}

std::shared_ptr<const std::vector<int64_t>> Committed::ShareStepCounts() const {
  step_counts_are_shared_ = true;
  return step_counts_;
}

void Committed::SetStepCounts(std::vector<int64_t> counts) {
  step_counts_ = std::make_shared<std::vector<int64_t>>(std::move(counts));
  step_counts_are_shared_ = false;
}

std::vector<int64_t>& Committed::OwnStepCounts() {
  if (step_counts_are_shared_) {
    SetStepCounts(*step_counts_);
  }
  return *step_counts_;
}

void Committed::WriteHeader(Changed what) {
  absl::Status status = journal_->WriteHeader({epoch_, step_, version_});
  if (status.ok() && logs_) status = WriteLog(what);
  if (status.ok()) return;
  if (logs_) log_->Touch();  // what it says is of another version
  LogError(absl::StrCat("job ", job_, ": ", status.message()));
}

absl::Status Committed::WriteLog(Changed what) {
  if (second_snapshot_.has_value() && what != Changed::kEpoch) {
    return LogFacts({version_, step_, {}}, trainer_states_, TakeUpLog::Counts::kSnapshot);
  }
  if (what == Changed::kEpoch || !shards_count_) {
    log_->SetVersion(epoch_, version_);
    return absl::OkStatus();
  }
  if (what == Changed::kStep) {
    log_->CommitStep({epoch_, step_, version_});
    return absl::OkStatus();
  }
  return LogFacts({version_, step_, {}}, trainer_states_, TakeUpLog::Counts::kShards);
}

absl::Status Committed::LogFacts(const SnapshotOf& of, const std::vector<std::string>& trainer_states,
                                 TakeUpLog::Counts counts) {
  v1::CommittedRecord facts;
  facts.mutable_step_counts()->Add(step_counts_->begin(), step_counts_->end());
  for (size_t param = 0; param < of.updated.size(); ++param) {
    if (of.updated[param]) facts.set_step_counts(static_cast<int>(param), (*step_counts_)[param] + 1);
  }
  for (const std::string& state : trainer_states) facts.add_trainer_states(state);
  facts.set_generation(of.version == version_ ? generation_ : next_generation_);
  return log_->Commit(facts, {epoch_, of.step, of.version}, counts, second_snapshot_.value_or(false));
}

Committed::~Committed() = default;

absl::Status Committed::Decide(const v1::DecidedStepRecord& record) {
  absl::Status written = journal_->WriteDecided(record);
  if (written.ok()) next_generation_ = record.generation();
  return written;
}

void Committed::SetProcess(int rank, const FormerProcess& process) {
  if (log_ != nullptr) log_->SetProcess(rank, process);
}

void Committed::ForgetProcess(int rank, bool finished) {
  if (log_ != nullptr) log_->ForgetProcess(rank, finished);
}

}  // namespace shardd
