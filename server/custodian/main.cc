// shardd-custodian: holds what survives a daemon (server/custodian/README.md).

#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/process/flags_help.h"
#include "common/shm/fd_channel.h"
#include "server/custodian/custodian.h"

ABSL_FLAG(std::string, listen, "unix:/run/shardd/custody.sock", "socket for the daemon, of the same user");
ABSL_FLAG(int64_t, custody_ms, 15 * 60 * 1000, "what no daemon owns for so long is freed; at least 1000");

ABSL_FLAG(bool, embedded, false, "end when there is neither a daemon nor anything of a job");

int main(int argc, char** argv) {
  shardd::ParseFlags("shardd-custodian: keeps the memory of shardd's jobs while there is no daemon",
                     "server/custodian/main.cc", argc, argv);
  const auto fail = [](const absl::Status& status) {
    std::fprintf(stderr, "shardd-custodian: %s\n", status.ToString().c_str());
    return 1;
  };
  shardd::Custodian::Options options;
  absl::StatusOr<std::string> path = shardd::ParseUnixAddress(absl::GetFlag(FLAGS_listen));
  if (!path.ok()) return fail(path.status());
  options.path = *std::move(path);
  options.embedded = absl::GetFlag(FLAGS_embedded);
  options.unowned = absl::Milliseconds(absl::GetFlag(FLAGS_custody_ms));
  if (options.unowned < absl::Seconds(1)) {
    return fail(absl::InvalidArgumentError("--custody_ms: out of range (want 1000 or more)"));
  }
  if (rlimit files{}; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const shardd::UniqueFd stop(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  absl::StatusOr<std::unique_ptr<shardd::Custodian>> custodian = shardd::Custodian::Create(std::move(options));
  if (!custodian.ok()) return fail(custodian.status());
  std::fprintf(stderr, "shardd-custodian: listens on %s\n", absl::GetFlag(FLAGS_listen).c_str());
  (*custodian)->Run(stop.get());
  return 0;
}
