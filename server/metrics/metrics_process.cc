#include "server/metrics/metrics_process.h"

#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/metrics/page_policy.h"
#include "server/observe/log.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<MetricsProcess>> MetricsProcess::Create(Options options) {
  if (options.listen.empty()) return nullptr;
  SHARDD_ASSIGN_OR_RETURN(
      const MetricsAddress address,
      ParseMetricsAddress("--metrics_listen", options.listen, options.insecure, !options.tls.certificate.empty()));
  if (!options.status_page.empty()) {
    SHARDD_RETURN_IF_ERROR(ParsePagePolicy("--status_page", options.status_page).status());
  }
  const bool over_tls = !address.is_local() && !options.insecure;
  if (over_tls && (options.tls.certificate.empty() || options.tls.key.empty() || options.tls.ca.empty())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--metrics_listen=", options.listen,
        ": others reach that address, so it needs --peer_cert, --peer_key and --peer_ca, or --metrics_insecure"));
  }
  std::error_code error;
  if (options.program.empty()) {
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
    options.program = (self.parent_path() / "shardd-metrics").string();
  }
  if (access(options.program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(
        "--metrics_listen: there is no program \"", options.program,
        "\", which serves metrics; build it with prometheus-cpp-dev installed, or start it elsewhere by itself"));
  }
  std::vector<std::string> argv = {options.program, absl::StrCat("--socket=unix:", options.socket),
                                   absl::StrCat("--listen=", options.listen), absl::StrCat("--ends_with=", getpid())};
  if (options.insecure) {
    argv.push_back("--metrics_insecure");
  } else if (over_tls) {  // it runs in another folder
    const auto absolute = [&error](const std::string& path) { return std::filesystem::absolute(path, error).string(); };
    argv.push_back(absl::StrCat("--tls_cert=", absolute(options.tls.certificate)));
    argv.push_back(absl::StrCat("--tls_key=", absolute(options.tls.key)));
    argv.push_back(absl::StrCat("--tls_ca=", absolute(options.tls.ca)));
  }
  if (!options.status_page.empty()) argv.push_back(absl::StrCat("--status_page=", options.status_page));
  return std::unique_ptr<MetricsProcess>(new MetricsProcess(std::move(argv)));
}

void MetricsProcess::Review(absl::Time now) {
  const bool has_started = start_at_ == absl::InfiniteFuture();
  if (!has_started && now >= start_at_) {
    absl::StatusOr<DetachedProcess> started = SpawnDetached(argv_, STDERR_FILENO);
    start_at_ = started.ok() ? absl::InfiniteFuture() : now + kPause;
    if (started.ok()) {
      process_ = *std::move(started);
    } else {
      LogWarning(started.status().message());
    }
    return;
  }
  pollfd end{process_.pidfd.get(), POLLIN, 0};
  if (!has_started || (process_.pidfd.valid() && poll(&end, 1, 0) == 0)) return;
  start_at_ = now + kPause;
  LogWarning(absl::StrCat("shardd-metrics (pid ", process_.pid, ") has ended; it is started again in ",
                          absl::FormatDuration(kPause)));
}

}  // namespace shardd
