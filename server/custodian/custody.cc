#include "server/custodian/custody.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/process/spawn.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr absl::Duration kAnswer = absl::Seconds(5);
constexpr absl::Duration kOwnerPoll = absl::Milliseconds(20);
constexpr absl::Duration kStart = absl::Seconds(2);
constexpr absl::Duration kStartPoll = absl::Milliseconds(2);

}  // namespace

absl::StatusOr<std::unique_ptr<Custody>> Custody::Connect(std::string path, absl::Duration limit, std::string program) {
  std::unique_ptr<Custody> custody(new Custody(std::move(path), std::move(program)));
  absl::MutexLock lock(&custody->mutex_);
  absl::Status status;
  // Whoever was killed just now is the owner until the kernel has closed its descriptors; the custodian may be
  // starting.
  for (const absl::Time until = MonotonicNow() + limit; MonotonicNow() <= until;) {
    status = custody->ConnectLocked();
    if (custody->program_fails_ || (!absl::IsFailedPrecondition(status) && !absl::IsUnavailable(status))) break;
    absl::SleepFor(kOwnerPoll);
  }
  SHARDD_RETURN_IF_ERROR(status);
  SHARDD_RETURN_IF_ERROR(custody->ListLocked());
  return custody;
}

absl::StatusOr<std::unique_ptr<Custody>> Custody::ConnectOwn(absl::string_view socket, absl::Duration limit) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return Connect(absl::StrCat(absl::StripSuffix(socket, ".sock"), "-custody.sock"), limit,
                 (self.parent_path() / "shardd-custodian").string());
}

absl::Status Custody::Check(const std::string& path) {
  const absl::Status dialled = Custody(path, "").Dial().status();
  return absl::Status(dialled.code(), absl::StrCat("custodian \"", path, "\": ", dialled.message()));
}

absl::StatusOr<UniqueFd> Custody::Dial() const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.empty() || path_.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("the path has a wrong length for a Unix socket");
  }
  std::memcpy(address.sun_path, path_.data(), path_.size());
  UniqueFd dialled(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!dialled.valid() || connect(dialled.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot connect: ", std::strerror(errno), "; start shardd-custodian there"));
  }
  return dialled;
}

absl::Status Custody::StartProgram() const {
  SHARDD_ASSIGN_OR_RETURN(
      const DetachedProcess process,
      SpawnDetached({program_, "--embedded", absl::StrCat("--listen=unix:", path_)}, STDERR_FILENO));
  for (absl::Duration waited; waited < kStart; waited += kStartPoll) {
    if (Dial().ok()) return absl::OkStatus();
    pollfd end{process.pidfd.get(), POLLIN, 0};
    if (!process.pidfd.valid() || poll(&end, 1, static_cast<int>(kStartPoll / absl::Milliseconds(1))) > 0) break;
  }
  return absl::UnavailableError(absl::StrCat("\"", program_, "\" does not listen"));
}

absl::Status Custody::ConnectLocked() {
  const auto named = [this](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("custodian \"", path_, "\": ", status.message()));
  };
  if (released_) return named(absl::UnavailableError("this daemon has handed over"));
  absl::StatusOr<UniqueFd> dialled = Dial();
  const bool starts = absl::IsUnavailable(dialled.status()) && !program_.empty() && !program_fails_;
  if (starts) {
    if (absl::Status started = StartProgram(); !started.ok()) {
      program_fails_ = true;
      return named(started);
    }
    dialled = Dial();
  }
  if (!dialled.ok()) return named(dialled.status());
  socket_ = *std::move(dialled);
  const absl::Status status = OwnLocked();
  if (status.ok()) return status;
  socket_.reset();
  // It listens, and answers nothing.
  program_fails_ = program_fails_ || (starts && !absl::IsFailedPrecondition(status));
  return named(status);
}

// In the oldest version, which a custodian from before there were ranges knows.
absl::Status Custody::OwnLocked() {
  version_ = kCustodyVersions.oldest;
  CustodyMessage own;
  own.op = CustodyOp::kOwn;
  own.newest = static_cast<uint32_t>(kCustodyVersions.newest);
  SHARDD_RETURN_IF_ERROR(CallLocked(own, -1));
  if (kCustodyVersions.Has(version_)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("it goes on in a version of custody that was not offered (got ",
                                               version_, ", want ", kCustodyVersions.Text(),
                                               "); start the custodian of this version"));
}

absl::Status Custody::CheckVersionLocked(const CustodyMessage& answer) const {
  if (answer.version == version_) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("an answer of another version of custody (got ", answer.version,
                                               ", want ", version_, "); start the custodian of this version"));
}

absl::Status Custody::CallLocked(CustodyMessage request, int fd) {
  request.version = static_cast<uint16_t>(version_);
  absl::Status status = SendCustody(socket_.get(), request, fd, kAnswer);
  if (status.ok()) {
    UniqueFd none;
    const absl::StatusOr<CustodyMessage> answer = ReceiveCustody(socket_.get(), &none, kAnswer);
    status = answer.ok() ? CheckVersionLocked(*answer) : answer.status();
    if (status.ok() && answer->op == CustodyOp::kAnswer) {
      if (request.op == CustodyOp::kOwn && answer->newest != 0) version_ = static_cast<int>(answer->newest);
      return absl::Status(static_cast<absl::StatusCode>(answer->code), answer->text);
    }
    if (status.ok()) status = absl::InternalError("an answer to another request");
  }
  socket_.reset();  // what comes later would be taken for the answer to something else
  return status;
}

absl::Status Custody::ListLocked() {
  CustodyMessage list;
  list.version = static_cast<uint16_t>(version_);
  list.op = CustodyOp::kList;
  SHARDD_RETURN_IF_ERROR(SendCustody(socket_.get(), list, -1, kAnswer));
  for (;;) {
    UniqueFd fd;
    SHARDD_ASSIGN_OR_RETURN(const CustodyMessage object, ReceiveCustody(socket_.get(), &fd, kAnswer));
    SHARDD_RETURN_IF_ERROR(CheckVersionLocked(object));
    if (object.op == CustodyOp::kEnd) return absl::OkStatus();
    if (object.op != CustodyOp::kObject || !fd.valid()) {
      return absl::Status(object.code == 0 ? absl::StatusCode::kInternal : static_cast<absl::StatusCode>(object.code),
                          absl::StrCat("custodian \"", path_, "\": list: ", object.text));
    }
    // A custodian that dies from here on gets it again.
    SHARDD_ASSIGN_OR_RETURN(held_[std::make_pair(object.job, std::string(object.name))],
                            Duplicate(object.name, fd.get()));
    taken_[{object.job, object.name}] = std::move(fd);
  }
}

Custody::Objects Custody::TakeUp() {
  absl::MutexLock lock(&mutex_);
  return std::move(taken_);
}

absl::StatusOr<Custody::Objects> Custody::HeldOf(uint64_t job) {
  absl::MutexLock lock(&mutex_);
  Objects copies;
  for (auto it = held_.lower_bound({job, ""}); it != held_.end() && it->first.first == job; ++it) {
    SHARDD_ASSIGN_OR_RETURN(copies[it->first], Duplicate(it->first.second, it->second.get()));
  }
  return copies;
}

absl::Status Custody::Put(uint64_t job, absl::string_view name, int fd) {
  absl::MutexLock lock(&mutex_);
  SHARDD_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(name, fd));
  const std::pair<uint64_t, std::string> key = {job, std::string(name)};
  UniqueFd before = std::exchange(held_[key], std::move(copy));
  if (!socket_.valid()) return PutAllLocked();
  CustodyMessage put;
  put.op = CustodyOp::kPut;
  put.job = job;
  put.SetName(name);
  absl::Status status = CallLocked(put, fd);
  // The custodian has died, and there may be another one already.
  if (!status.ok() && !socket_.valid()) return PutAllLocked();
  if (!status.ok()) {  // it was refused, and another custodian is not to be asked for it
    if (before.valid()) {
      held_[key] = std::move(before);
    } else {
      held_.erase(key);
    }
  }
  return status;
}

void Custody::Release() {
  absl::MutexLock lock(&mutex_);
  // The next one would wait for the end of this process, which waits for the next one.
  if (const UniqueFd readable(eventfd(1, EFD_CLOEXEC)); socket_.valid() && readable.valid()) {
    CustodyMessage put;
    put.op = CustodyOp::kPut;
    put.SetName(kCustodyDaemonName);
    if (const absl::Status status = CallLocked(put, readable.get()); !status.ok()) {
      LogWarning(absl::StrCat("the next daemon waits for the end of this one: ", status.message()));
    }
  }
  released_ = true;
  socket_.reset();
}

void Custody::Drop(uint64_t job) {
  absl::MutexLock lock(&mutex_);
  if (released_) return;
  held_.erase(held_.lower_bound({job, ""}), held_.lower_bound({job + 1, ""}));
  CustodyMessage drop;
  drop.op = CustodyOp::kDrop;
  drop.job = job;
  if (!socket_.valid() || !CallLocked(drop, -1).ok()) undropped_.insert(job);
}

void Custody::Review() {
  absl::MutexLock lock(&mutex_);
  if (released_) return;
  pollfd polled{socket_.get(), POLLIN, 0};
  if (socket_.valid() && poll(&polled, 1, 0) == 0) return;
  socket_.reset();
  const absl::Status status = PutAllLocked();
  if (status.ok()) {
    LogWarning(absl::StrCat("custodian \"", path_, "\" was started anew, and has all jobs again"));
  } else if (!said_) {
    LogWarning(absl::StrCat("jobs would end with this daemon, until there is a custodian again: ", status.message()));
  }
  said_ = !status.ok();
}

absl::Status Custody::PutAllLocked() {
  SHARDD_RETURN_IF_ERROR(ConnectLocked());
  absl::Status status;
  while (status.ok() && !undropped_.empty()) {  // it may be the one of before, which was only slow
    CustodyMessage drop;
    drop.op = CustodyOp::kDrop;
    drop.job = *undropped_.begin();
    status = CallLocked(drop, -1);
    if (status.ok()) undropped_.erase(undropped_.begin());
  }
  // A job is one when its description is there: that comes last.
  for (const bool description : {false, true}) {
    for (const auto& [key, fd] : held_) {
      if (!status.ok()) break;
      if ((key.second == kCustodyJobName) != description) continue;
      CustodyMessage put;
      put.op = CustodyOp::kPut;
      put.job = key.first;
      put.SetName(key.second);
      status = CallLocked(put, fd.get());
    }
  }
  if (!status.ok()) socket_.reset();  // Review tries again
  return status;
}

}  // namespace shardd
