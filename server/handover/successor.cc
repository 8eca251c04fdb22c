#include "server/handover/successor.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kStartLimit = absl::Minutes(2);  // contexts and kernels of eight GPUs
// Before it listens it completes updates that could not be ended here, of jobs over nodes or on GPUs.
constexpr absl::Duration kListenLimit = absl::Minutes(5);
constexpr absl::Duration kListenPoll = absl::Milliseconds(20);
constexpr char kTakeOver[] = "--take_over";

bool IsListening(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const UniqueFd dialled(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!dialled.valid() || path.size() >= sizeof(address.sun_path)) return false;
  path.copy(address.sun_path, path.size());
  return connect(dialled.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno == EAGAIN;
}

}  // namespace

Successor::Successor(const std::vector<std::string>& arguments) : arguments_(arguments) {
  std::error_code error;
  program_ = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (!arguments_.empty()) arguments_.erase(arguments_.begin());
  std::erase(arguments_, kTakeOver);  // of one that is a successor itself
}

absl::Status Successor::Start() {
  if (process_.pid != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("hand over: the next daemon is starting already (pid ", process_.pid, ")"));
  }
  if (getpid() == 1) {
    return absl::FailedPreconditionError(
        "hand over: this daemon is process 1 of its container, and its end ends all others there; start another "
        "container with --take_over");
  }
  if (program_.empty()) return absl::FailedPreconditionError("hand over: /proc does not say which program this is");
  std::vector<std::string> argv = {program_, kTakeOver};
  argv.insert(argv.end(), arguments_.begin(), arguments_.end());
  SHARDD_ASSIGN_OR_RETURN(process_, SpawnDetached(argv, STDERR_FILENO, /*folder=*/"."));
  deadline_ = MonotonicNow() + kStartLimit;
  return absl::OkStatus();
}

absl::Status Successor::Review() {
  if (process_.pid == 0) return absl::OkStatus();
  const bool ended = HasEnded();
  if (!ended && MonotonicNow() < deadline_) return absl::OkStatus();
  const pid_t pid = process_.pid;
  Terminate();
  return absl::UnavailableError(absl::StrCat("hand over: the next daemon (pid ", pid, ") ",
                                             ended ? "has ended before it was ready" : "is not ready in time",
                                             "; this one goes on, and the reason is in the log"));
}

void Successor::Terminate() {
  if (process_.pid != 0) TerminateDetached(process_);
  process_ = DetachedProcess();
}

absl::Status Successor::AwaitListening(const std::string& path) {
  const absl::Time deadline = MonotonicNow() + kListenLimit;
  while (!IsListening(path)) {
    const bool ended = process_.pid != 0 && HasEnded();
    if (ended || MonotonicNow() > deadline) {
      return absl::UnavailableError(absl::StrCat("hand over: nobody listens on ", path, " (",
                                                 ended ? absl::StrCat("pid ", process_.pid, " has ended")
                                                       : absl::StrCat("after ", absl::FormatDuration(kListenLimit)),
                                                 "); start shardd there: the custodian has the jobs"));
    }
    absl::SleepFor(kListenPoll);
  }
  return absl::OkStatus();
}

bool Successor::HasEnded() const {
  pollfd end{process_.pidfd.get(), POLLIN, 0};
  return !process_.pidfd.valid() || poll(&end, 1, 0) > 0;
}

}  // namespace shardd
