#include "client/ctl/handover.h"

#include <signal.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/address.h"
#include "common/clock/monotonic_now.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd::ctl {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr absl::Duration kAnswer = absl::Seconds(5);

struct Seen {
  pid_t pid = 0;  // in this process' namespace; 0: it cannot be seen from there
  v1::Daemon daemon;
};

// The daemon that listens at `path` at this moment.
absl::StatusOr<Seen> Ask(const std::string& path) {
  SHARDD_ASSIGN_OR_RETURN(Connection connection, ConnectToDaemon("unix:" + path));
  ucred peer{};
  socklen_t size = sizeof(peer);
  Seen seen;
  if (getsockopt(connection.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) seen.pid = peer.pid;
  const auto stub = v1::JobsService::NewStub(grpc::CreateInsecureChannelFromFd("shardd", connection.socket.release()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kAnswer));
  SHARDD_RETURN_IF_ERROR(FromGrpcStatus(stub->GetDaemon(&context, v1::GetDaemonRequest(), &seen.daemon)));
  return seen;
}

}  // namespace

absl::StatusOr<std::string> HandOver(const std::string& path, const Options& options) {
  SHARDD_ASSIGN_OR_RETURN(const Seen before, Ask(path));
  const std::string& state = before.daemon.handover();
  if (state.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("hand over: shardd ", before.daemon.version(),
                                                      " cannot; restart it, its jobs outlive that with a custodian"));
  }
  if (absl::StartsWith(state, "impossible")) {
    return absl::FailedPreconditionError(absl::StrCat("hand over: ", state));
  }
  const absl::Time start = MonotonicNow();
  if (before.pid == 0 || kill(before.pid, SIGUSR2) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        "hand over: the daemon (pid ", before.daemon.pid(), ") cannot be signalled from here (",
        before.pid == 0 ? "it is in another PID namespace" : std::strerror(errno), "); be its user or root there"));
  }
  while (MonotonicNow() - start < options.timeout) {
    absl::SleepFor(kPoll);
    const absl::StatusOr<Seen> now = Ask(path);
    if (!now.ok()) continue;  // between the two nobody listens
    if (now->daemon.start_time_unix_ms() != before.daemon.start_time_unix_ms() || now->pid != before.pid) {
      return absl::StrCat("pid ", now->pid, " (shardd ", now->daemon.version(), ") has taken the place of pid ",
                          before.pid, " (shardd ", before.daemon.version(), "), with ", now->daemon.jobs(),
                          " job(s), after ",
                          absl::FormatDuration(absl::Trunc(MonotonicNow() - start, absl::Milliseconds(1))), "\n");
    }
    if (absl::StartsWith(now->daemon.handover(), "failed") && now->daemon.handover() != state) {
      return absl::AbortedError(now->daemon.handover());
    }
  }
  return absl::DeadlineExceededError(absl::StrCat("hand over: the next daemon has not come within ",
                                                  absl::FormatDuration(options.timeout), "; see the daemon's log"));
}

}  // namespace shardd::ctl
