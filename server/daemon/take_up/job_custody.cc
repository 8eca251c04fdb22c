#include "server/daemon/take_up/job_custody.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/device/device_memory.h"
#include "server/observe/log.h"
#include "server/storage/job_slab.h"
#include "server/storage/kept_formats.h"
#include "server/storage/kept_on_gpus.h"

namespace shardd {
namespace {

constexpr char kSaltName[] = "secret salt";
constexpr absl::Duration kFormerDaemon = absl::Seconds(10);  // to be gone, with what its GPUs do

// Whether the daemon has ended whose pidfd this is. Its context of a GPU, and what runs there, goes before it does.
absl::Status AwaitEnd(const UniqueFd& daemon) {
  if (!daemon.valid()) return absl::OkStatus();  // it gave none: a kernel before 5.3
  pollfd polled{daemon.get(), POLLIN, 0};
  int ended;
  do {
    ended = poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kFormerDaemon)));
  } while (ended < 0 && errno == EINTR);
  return ended > 0 ? absl::OkStatus()
                   : absl::UnavailableError(absl::StrCat(
                         "the daemon before has not ended within ", absl::FormatDuration(kFormerDaemon),
                         ", and its GPUs may still write its jobs' memory; this one ends, and the next one "
                         "waits again: see that the former process ends"));
}

// Whether what is to be handed over can be had back, by this driver.
absl::Status CheckMayTakeUp(const JobMemory& memory, TakeUpLog* log) {
  SHARDD_RETURN_IF_ERROR(log->PinFor(memory.place()));
  CustodySlabs slabs;
  memory.DescribeKept(&slabs);
  const bool offloaded = memory.shards()->on_host();
  const char* const name = offloaded ? kUnshardedPoolName : "shards";
  const JobSlab* const slab = offloaded ? memory.pool() : memory.shards();
  if (slab == nullptr) return absl::OkStatus();  // there is nothing of it on GPUs
  const std::vector<DeviceSlab::Piece>& pieces = slab->on_devices()->pieces();
  KeptFds fds;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].on == nullptr) continue;
    SHARDD_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(name, pieces[i].fd));
    fds.emplace(PieceName(name, i), std::move(copy));
  }
  return TakeUpPieces(name, slabs, memory.place(), &fds).status();
}

}  // namespace

absl::Status JobCustody::HandOver(int node, const std::string& link_key, JobCore::Init* init) const {
  const SlabPlace& place = init->memory->place();
  const bool on_gpus = place.memory != nullptr;
  if (!Keeps(*init->plan)) return absl::OkStatus();
  const bool is_new = init->take_up_log == nullptr;
  const auto exists = std::make_shared<std::atomic<bool>>(!is_new);
  const auto put = [custody = custody_, id = init->id, exists](const std::string& name, int fd) {
    const absl::Status status = custody->Put(id, name, fd);
    const bool no_custodian = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
    if (*exists && no_custodian) return absl::OkStatus();  // Review hands it over
    return status.ok() ? status
                       : absl::Status(status.code(), absl::StrCat("hand over \"", name, "\": ", status.message()));
  };
  if (is_new) {
    SHARDD_ASSIGN_OR_RETURN(init->take_up_log, TakeUpLog::Create(TakeUpLog::SizesFor(*init->plan),
                                                                 TakeUpLog::FormatFor(*init->plan, place)));
    if (const absl::Status may = on_gpus ? CheckMayTakeUp(*init->memory, init->take_up_log.get()) : absl::OkStatus();
        !may.ok()) {
      LogWarning(absl::StrCat("job ", init->spec.name(),
                              " ends with this daemon: its GPUs' memory cannot be taken up: ", may.message()));
      absl::MutexLock lock(&mutex_);
      why_gpus_end_ = std::string(may.message());
      init->take_up_log = nullptr;
      init->memory->FreeOldValues();
      return absl::OkStatus();
    }
    init->kept_formats = KeptFormatsOf(kCustodyFormats.newest, init->journal->format(), init->take_up_log->format());
    SHARDD_RETURN_IF_ERROR(put(kCustodyJournalName, init->journal->fd()));
    SHARDD_RETURN_IF_ERROR(put(kCustodyLogName, init->take_up_log->fd()));
  }
  SHARDD_RETURN_IF_ERROR(init->memory->KeepBy(put));
  if (!is_new) return absl::OkStatus();
  v1::CustodyJob job;
  job.set_format(static_cast<uint32_t>(init->kept_formats.job_record()));
  job.set_job_id(init->id);
  job.set_owner_uid(init->owner.uid);
  if (init->owner.secret.has_value()) {
    job.set_secret_digest(init->owner.secret->data(), init->owner.secret->size());
  }
  *job.mutable_spec() = init->spec;
  job.set_plan_digest(init->plan->digest);
  job.set_node(node);
  job.set_link_key(link_key);
  init->memory->DescribeKept(job.mutable_slabs_on_gpus());
  for (const DeviceMemory* gpu : place.users) job.add_gpu_uuids(gpu->device_uuid());
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> record, MakeCustodyRecord(kCustodyJobName, job));
  SHARDD_RETURN_IF_ERROR(put(kCustodyJobName, record->fd()));
  *exists = true;
  return absl::OkStatus();
}

std::string JobCustody::Warning() const {
  absl::MutexLock lock(&mutex_);
  if (why_gpus_end_.empty()) return "";
  return absl::StrCat("jobs on GPUs end with this daemon, because its driver lets no other process have their memory (",
                      why_gpus_end_, "); save checkpoints");
}

void JobCustody::Review() const {
  if (custody_ != nullptr) custody_->Review();
}

void JobCustody::Drop(uint64_t job) const {
  if (custody_ != nullptr) custody_->Drop(job);
}

absl::StatusOr<JobMemory::Kept> JobCustody::LeftOf(uint64_t job) const {
  SHARDD_ASSIGN_OR_RETURN(Custody::Objects held, custody_->HeldOf(job));
  JobMemory::Kept kept;
  for (auto& [key, fd] : held) kept[key.second] = std::move(fd);
  return kept;
}

absl::StatusOr<std::vector<std::pair<uint64_t, JobMemory::Kept>>> JobCustody::TakeUp(bool on_gpus) const {
  std::vector<std::pair<uint64_t, JobMemory::Kept>> result;
  if (custody_ == nullptr) return result;
  std::map<uint64_t, JobMemory::Kept> jobs;
  for (auto& [key, fd] : custody_->TakeUp()) jobs[key.first][key.second] = std::move(fd);
  v1::CustodyDaemon own;
  const auto format = [&] { return own.format() == 0 ? 1 : static_cast<int>(own.format()); };
  if (UniqueFd salt = TakeKept(jobs[0], kSaltName);
      salt.valid() && ReadCustodyRecord(kSaltName, std::move(salt), &own).ok()) {
    if (absl::Status reads = CheckFormat("the daemon's own record", format(), kCustodyFormats); reads.ok()) {
      UseSecretSalt(own.secret_salt());
    } else {  // it stays for the daemon that reads it
      LogError(absl::StrCat("jobs with a secret of the daemon before admit nobody here: ", reads.message()));
    }
  } else {
    own.set_format(static_cast<uint32_t>(kCustodyFormats.newest));
    own.set_secret_salt(SecretSalt());
    const absl::StatusOr<std::unique_ptr<Slab>> record = MakeCustodyRecord(kSaltName, own);
    const absl::Status put = record.ok() ? custody_->Put(0, kSaltName, (*record)->fd()) : record.status();
    if (!put.ok()) LogWarning(absl::StrCat("jobs with a secret end with this daemon: ", put.message()));
  }
  const UniqueFd former = TakeKept(jobs[0], kCustodyDaemonName);
  jobs.erase(0);
  if (on_gpus && !jobs.empty()) SHARDD_RETURN_IF_ERROR(AwaitEnd(former));
  // From here on this one's GPUs write the jobs' memory.
  const UniqueFd self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (const absl::Status put = self.valid() ? custody_->Put(0, kCustodyDaemonName, self.get()) : absl::OkStatus();
      !put.ok()) {
    LogWarning(absl::StrCat("the next daemon will not know when this one has ended: ", put.message()));
  }
  for (auto& [id, kept] : jobs) result.emplace_back(id, std::move(kept));
  return result;
}

}  // namespace shardd
