// shardd-metrics: serves a daemon's metrics over HTTP (server/metrics/README.md).

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/process/flags_help.h"
#include "common/shm/fd_channel.h"
#include "common/shm/unique_fd.h"
#include "common/status/status_macros.h"
#include "prometheus/text_serializer.h"
#include "server/metrics/collector.h"
#include "server/metrics/http/http_server.h"
#include "server/metrics/http/listen_address.h"
#include "server/metrics/http/listening.h"
#include "server/metrics/metrics_source.h"
#include "server/metrics/page_policy.h"
#include "server/metrics/status_page.h"
#include "server/metrics/viewer.h"
#include "server/observe/log.h"

ABSL_FLAG(
    std::string, socket, "unix:/run/shardd/shardd.sock",
    "the daemon's Unix socket. What it says depends on who asks: root, the daemon's user and its --view_group see all "
    "jobs");
ABSL_FLAG(std::string, listen, "127.0.0.1:9464",
          "where metrics are served, at /metrics, and a page at /: host:port with an IPv4 address, or unix:/path, a "
          "socket of mode 0660");
ABSL_FLAG(std::string, tls_cert, "",
          "serve HTTPS with this certificate, a PEM file with the chain behind it; read again when the file changes");
ABSL_FLAG(std::string, tls_key, "", "its key, a PEM file");
ABSL_FLAG(std::string, tls_ca, "",
          "with TLS: clients need a certificate of this authority, a PEM file; empty: they need none");
ABSL_FLAG(bool, metrics_insecure, false,
          "listen on an address that others reach, too: whoever does may read the names of all jobs and users");
ABSL_FLAG(
    std::string, status_page, "own",
    "whose jobs the page at / shows: own: of the user whose browser asks, by the owner of its socket on this "
    "machine (root and this process's user see all; from elsewhere nobody is known, and sees none); all: all jobs, "
    "to whoever reaches the port; off: there is no page");
ABSL_FLAG(int, ends_with, 0, "end when the process of this number has ended: the daemon's; 0: never");

namespace shardd {
namespace {

// The one before, of a daemon that hands over or has died, has the port for so long at most.
constexpr absl::Duration kPortLimit = absl::Seconds(30);
constexpr absl::Duration kPortPoll = absl::Milliseconds(50);

// Until a signal, or the end of the process: true.
bool AwaitEnd(int signals, int process, absl::Duration limit) {
  pollfd ends[] = {{signals, POLLIN, 0}, {process, POLLIN, 0}};
  const int ms = limit == absl::InfiniteDuration() ? -1 : static_cast<int>(limit / absl::Milliseconds(1));
  return poll(ends, 2, ms) > 0;
}

HttpResponse Serialized(const Collector& collector) {
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, collector.Collect());
  return {200, "text/plain; version=0.0.4; charset=utf-8", std::move(text).str()};
}

PageReach PageReachOf(const MetricsAddress& address, const TlsFiles& tls) {
  if (!address.path.empty() || !tls.certificate.empty()) return PageReach::kFront;
  return address.is_local() ? PageReach::kLoopback : PageReach::kOthers;
}

absl::Status Run() {
  SHARDD_ASSIGN_OR_RETURN(const std::string socket, ParseUnixAddress(absl::GetFlag(FLAGS_socket)));
  const TlsFiles tls{absl::GetFlag(FLAGS_tls_cert), absl::GetFlag(FLAGS_tls_key), absl::GetFlag(FLAGS_tls_ca)};
  SHARDD_RETURN_IF_ERROR(CheckTlsFiles(tls));
  SHARDD_ASSIGN_OR_RETURN(const MetricsAddress address,
                          ParseMetricsAddress("--listen", absl::GetFlag(FLAGS_listen),
                                              absl::GetFlag(FLAGS_metrics_insecure), !tls.certificate.empty()));
  SHARDD_ASSIGN_OR_RETURN(const PagePolicy policy, ParsePagePolicy("--status_page", absl::GetFlag(FLAGS_status_page)));
  UniqueFd process;
  if (const int pid = absl::GetFlag(FLAGS_ends_with); pid != 0) {
    process = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!process.valid()) return absl::OkStatus();  // it has ended already
  }
  sigset_t ending;
  sigemptyset(&ending);
  sigaddset(&ending, SIGTERM);
  sigaddset(&ending, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ending, nullptr);  // before any other thread starts
  const UniqueFd signals(signalfd(-1, &ending, SFD_CLOEXEC | SFD_NONBLOCK));
  const MetricsSource source(socket);
  const Collector collector([&source](absl::Duration limit) { return source.Get(limit); }, MonotonicNow);
  HttpServer::Handlers handlers;
  const PageReach reach = PageReachOf(address, tls);
  handlers["/metrics"] = [&collector, reach](const HttpRequest& request) {
    if (reach == PageReach::kLoopback && !IsAddress(request.host)) {
      return HttpResponse{
          403, "text/plain; charset=utf-8",
          "metrics are served under an address or localhost alone: no other site's script reads them\n"};
    }
    return Serialized(collector);
  };
  StatusPage page(&source, policy, reach, MonotonicNow);
  page.AddTo(&handlers);
  absl::StatusOr<std::unique_ptr<Listening>> server = Listening::Start(address, tls, handlers);
  for (absl::Duration waited; absl::IsUnavailable(server.status()) && waited < kPortLimit; waited += kPortPoll) {
    if (AwaitEnd(signals.get(), process.get(), kPortPoll)) return absl::OkStatus();
    server = Listening::Start(address, tls, handlers);
  }
  SHARDD_RETURN_IF_ERROR(server.status());
  LogInfo(absl::StrCat("shardd-metrics serves ", (*server)->url(), " of unix:", socket));
  AwaitEnd(signals.get(), process.get(), absl::InfiniteDuration());
  // At once, so that the next daemon's has the port: civetweb would wait for connections that are kept open.
  _exit(0);
}

}  // namespace
}  // namespace shardd

int main(int argc, char** argv) {
  shardd::ParseFlags("shardd-metrics: serves a shardd's metrics to Prometheus, as a process of its own",
                     "server/metrics/main.cc", argc, argv);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = shardd::Run();
  if (!status.ok()) shardd::LogError(status.ToString());
  std::fflush(stderr);
  // gRPC's own shutdown can wait for threads that have nothing left to do.
  _exit(status.ok() ? 0 : 1);
}
