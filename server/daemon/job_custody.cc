#include "server/daemon/job_custody.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr char kSaltName[] = "secret salt";

}  // namespace

absl::Status JobCustody::HandOver(int node, const std::string& link_key, JobCore::Init* init) const {
  if (custody_ == nullptr || !OutlivesDaemon(*init->plan) || init->memory->place().memory != nullptr) {
    return absl::OkStatus();
  }
  const auto exists = std::make_shared<std::atomic<bool>>(false);
  const auto put = [custody = custody_, id = init->id, exists](const std::string& name, int fd) {
    const absl::Status status = custody->Put(id, name, fd);
    if (*exists && absl::IsUnavailable(status)) return absl::OkStatus();  // Review hands it over
    return status.ok() ? status
                       : absl::Status(status.code(), absl::StrCat("hand over \"", name, "\": ", status.message()));
  };
  const bool is_new = init->take_up_log == nullptr;
  if (is_new) {
    SHARDD_ASSIGN_OR_RETURN(init->take_up_log, TakeUpLog::Create(TakeUpLogSizes(*init->plan)));
    SHARDD_RETURN_IF_ERROR(put(kCustodyJournalName, init->journal->fd()));
    SHARDD_RETURN_IF_ERROR(put(kCustodyLogName, init->take_up_log->fd()));
  }
  SHARDD_RETURN_IF_ERROR(init->memory->KeepBy(put));
  if (!is_new) {
    *exists = true;
    return absl::OkStatus();
  }
  v1::CustodyJob job;
  job.set_format(kCustodyFormat);
  job.set_job_id(init->id);
  job.set_owner_uid(init->owner.uid);
  if (init->owner.secret.has_value()) {
    job.set_secret_digest(init->owner.secret->data(), init->owner.secret->size());
  }
  *job.mutable_spec() = init->spec;
  job.set_plan_digest(init->plan->digest);
  job.set_node(node);
  job.set_link_key(link_key);
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> record, MakeCustodyRecord(kCustodyJobName, job));
  SHARDD_RETURN_IF_ERROR(put(kCustodyJobName, record->fd()));
  *exists = true;
  return absl::OkStatus();
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
  if (UniqueFd salt = TakeKept(jobs[0], kSaltName);
      salt.valid() && ReadCustodyRecord(kSaltName, std::move(salt), &own).ok()) {
    UseSecretSalt(own.secret_salt());
  } else {
    own.set_secret_salt(SecretSalt());
    const absl::StatusOr<std::unique_ptr<Slab>> record = MakeCustodyRecord(kSaltName, own);
    const absl::Status put = record.ok() ? custody_->Put(0, kSaltName, (*record)->fd()) : record.status();
    if (!put.ok()) LogWarning(absl::StrCat("jobs with a secret end with this daemon: ", put.message()));
  }
  jobs.erase(0);
  for (auto& [id, kept] : jobs) result.emplace_back(id, ReadTakenUpJob(std::move(kept)));
  return result;
}

}  // namespace shardd
