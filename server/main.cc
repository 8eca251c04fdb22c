// shardd: one daemon per node. Owns the jobs' shards and devices; see README.md.

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/process/flags_help.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"
#include "common/version.h"
#include "server/daemon/byte_quota.h"
#include "server/daemon/collectives.h"
#include "server/daemon/core.h"
#include "server/device/devices.h"
#include "server/handover/handover.h"
#include "server/handover/successor.h"
#include "server/handover/take_over.h"
#include "server/history/history.h"
#include "server/metrics/metrics_process.h"
#include "server/observe/log.h"
#include "server/observe/notify.h"
#include "server/peer/link_certificate.h"
#include "server/peer/peer_flags.h"
#include "server/peer/peer_network.h"
#include "server/service/grpc_server.h"
#include "server/service/jobs_service.h"
#include "server/service/listener.h"
#include "server/service/peer_registry.h"
#include "server/service/session_reactor.h"
#include "server/service/trainer_service.h"
#include "server/service/view_group.h"

ABSL_FLAG(std::string, listen, "unix:/run/shardd/shardd.sock", "Unix socket for gRPC and descriptors");
ABSL_FLAG(std::string, devices, "cpu:1",
          "devices of this node: cpu:N gives N logical CPU devices, cuda:all or cuda:0,1 GPUs");
ABSL_FLAG(std::string, collective, "auto",
          "what adds fp32 gradients of ranks with a GPU each: local (the daemon's copies and kernel), nccl, or auto "
          "(nccl if a trial at the start finds it faster, or GPUs do not reach each other); status says which and why");
ABSL_FLAG(bool, collective_trial, false,
          "the daemon's own, for the process in which it tries NCCL (--collective=auto): only do that");
ABSL_FLAG(
    int, offload_threads, 0,
    "threads that update the state that jobs on GPUs keep in host memory (JobConfig.offload), for all jobs together; "
    "0: half of the CPUs, 16 at most");
ABSL_FLAG(std::string, nccl_library, shardd::kDefaultNcclLibrary, "NCCL, 2.28 or later: a name or a path");
ABSL_FLAG(bool, nccl_windows, false,
          "with NCCL: register gradient slots as symmetric windows, for NCCL's kernels that read all GPUs' "
          "gradients in place; takes effect if GPUs have NVLink, and costs each job its own communicator");
ABSL_FLAG(std::string, peer_listen, "",
          "address for the daemons of other nodes, for jobs that span several nodes: host:port; empty: not served");
ABSL_FLAG(std::string, peer_address, "",
          "this daemon's address in a job's nodes, if it is not --peer_listen: host:port as the others resolve it");
ABSL_FLAG(std::string, peer_cert, "",
          "this daemon's certificate for other daemons, a PEM file; with --peer_key and "
          "--peer_ca: links between daemons are mutual TLS");
ABSL_FLAG(std::string, peer_key, "", "its key, a PEM file");
ABSL_FLAG(std::string, peer_ca, "", "the authority of all daemons' certificates, a PEM file");
ABSL_FLAG(bool, peer_insecure, false,
          "allow links between daemons without certificates, on any address: whoever reaches the port can take part in "
          "jobs and keep the daemon busy");
ABSL_FLAG(int, peer_keepalive_ms, 8'000,
          "another node's daemon that is silent for twice this time is lost: its machine has stopped or is gone "
          "(1000 to 600000)");
// Nothing is in files any more; command lines that name a directory still work.
ABSL_RETIRED_FLAG(std::string, state_dir, "", "no longer used: jobs have only anonymous memory");
ABSL_FLAG(
    std::string, custodian, "",
    "socket of shardd-custodian, as in unix:/run/shardd/custody.sock: jobs outlive this daemon, "
    "and the next one goes on with them; empty: jobs end with the daemon, but for an embedded one's, which starts its "
    "own");
ABSL_FLAG(std::string, history_dir, "",
          "folder for a history of all jobs' steps and events, which shardctl history and why show, also of those that "
          "have ended; empty: there is none");
ABSL_FLAG(int, history_mib, 64, "room for that history; the oldest goes (8 to 1000000)");
ABSL_FLAG(bool, embedded, false, "end after the last job, or if no job is opened for a minute");
ABSL_FLAG(bool, take_over, false,
          "take the place of the daemon that listens on --listen, if one does, when this one is ready: jobs that a "
          "custodian keeps go on here");
ABSL_FLAG(int, finish_step_ms, 20'000, "how long SIGTERM waits for the running step of jobs that outlive this daemon");
ABSL_FLAG(int, max_jobs_per_uid, 64, "jobs that one user may have at a time");
ABSL_FLAG(
    std::string, max_bytes_per_uid, "",
    "slabs of all jobs of one user together: bytes, or a share of what memory of the host was free when the daemon "
    "began, with that of its GPUs, as in 50%; 0: no quota; empty: 50%, and none with --embedded");
ABSL_FLAG(bool, reflection, true,
          "serve gRPC reflection: any gRPC command line lists, describes and calls shardd.v1.JobsService");
ABSL_FLAG(bool, channelz, false,
          "serve gRPC channelz, whose requests gRPC decodes without the daemon's limits on memory: for trusted users");
ABSL_FLAG(
    std::string, view_group, "shardd-view",
    "members of this group, a name or a number, may ask for the jobs of all users and change none, from the daemon's "
    "own PID and user namespaces; empty, or a group that there is not when the daemon starts: nobody");
ABSL_FLAG(std::string, metrics_listen, "",
          "serve metrics for Prometheus there, at /metrics: host:port with an IPv4 address, as 127.0.0.1:9464, or "
          "unix:/path, by shardd-metrics, a process beside this one that is started and ends with it. An address that "
          "others reach has the TLS of --peer_cert, for clients with a certificate of --peer_ca. Empty: not served");
ABSL_FLAG(bool, metrics_insecure, false,
          "allow --metrics_listen without TLS on an address that others reach: they may read the names of all jobs and "
          "users");
ABSL_FLAG(std::string, status_page, "own", "whose jobs its page at / shows: own (of the browser's user), all or off");
ABSL_FLAG(std::string, log_level, "", "debug, info, warning, error or none; empty: SHARDD_LOG_LEVEL, else info");

namespace shardd {
namespace {

constexpr int64_t kEmbeddedLogBytes = int64_t{4} << 20;
constexpr absl::Duration kLastWords = absl::Seconds(2);
// Of calls that are none of sessions; connections alone, which clients keep until they have another daemon, get it too.
constexpr absl::Duration kShutdownGrace = absl::Milliseconds(100);
constexpr absl::Duration kFormerDaemon = absl::Seconds(10);  // to be gone, from the custodian's view

// Not for an embedded daemon: it would reach the service manager of the trainer that started it.
void Notify(absl::string_view state) {
  if (absl::GetFlag(FLAGS_embedded)) return;
  if (const absl::Status status = NotifyServiceManager(state); !status.ok()) LogWarning(status.message());
}

// The custodian of --custodian, or of an embedded daemon's own: one for its socket `path`, which it starts. Null: none.
absl::StatusOr<std::shared_ptr<Custody>> ConnectCustody(const std::string& path) {
  if (const std::string custodian = absl::GetFlag(FLAGS_custodian); !custodian.empty()) {
    SHARDD_ASSIGN_OR_RETURN(std::string custody_path, ParseUnixAddress(custodian));
    return Custody::Connect(std::move(custody_path), kFormerDaemon);
  }
  if (!absl::GetFlag(FLAGS_embedded)) return nullptr;
  absl::StatusOr<std::unique_ptr<Custody>> own = Custody::ConnectOwn(path, kFormerDaemon);
  if (own.ok()) return *std::move(own);
  LogWarning(absl::StrCat("jobs end with this daemon: ", own.status().message()));
  return nullptr;
}

PeerFlags FlagsOfPeers() {
  PeerFlags flags;
  flags.address = absl::GetFlag(FLAGS_peer_address);
  flags.network.listen = absl::GetFlag(FLAGS_peer_listen);
  flags.network.certificate = absl::GetFlag(FLAGS_peer_cert);
  flags.network.key = absl::GetFlag(FLAGS_peer_key);
  flags.network.ca = absl::GetFlag(FLAGS_peer_ca);
  flags.network.insecure = absl::GetFlag(FLAGS_peer_insecure);
  flags.network.keepalive_ms = absl::GetFlag(FLAGS_peer_keepalive_ms);
  return flags;
}

absl::StatusOr<int> OffloadThreads(int asked) {
  constexpr int kMost = 256;
  if (asked < 0 || asked > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("--offload_threads: out of range (got ", asked, ", want 0 to ", kMost, ")"));
  }
  return asked > 0 ? asked : std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 16);
}

// Makes devices on a thread that blocks `signals`, so that the threads that it starts (the driver's too) also block
// them: only Run waits for them. Until then a signal ends the process, even if the driver hangs.
absl::StatusOr<Devices> MakeDevicesWithout(const sigset_t& signals) {
  const std::string devices = absl::GetFlag(FLAGS_devices);
  if (!absl::StartsWith(devices, "cuda:")) {  // no driver, so no need; a thread has a heap of its own
    sigset_t before;
    pthread_sigmask(SIG_BLOCK, &signals, &before);
    absl::StatusOr<Devices> made = MakeDevices(devices);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return made;
  }
  absl::StatusOr<Devices> made = absl::UnknownError("not made");
  std::thread([&made, &signals, &devices] {
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    made = MakeDevices(devices);
  }).join();
  return made;
}

// One user's memory where the flag does not say: what is left is enough for another's job.
constexpr absl::string_view kSharedQuota = "50%";

absl::StatusOr<int64_t> QuotaPerUser(const Devices& made) {
  std::string text = absl::GetFlag(FLAGS_max_bytes_per_uid);
  if (text.empty()) text = std::string(absl::GetFlag(FLAGS_embedded) ? "0" : kSharedQuota);
  int64_t memory_bytes = 0;
  if (absl::EndsWith(text, "%")) {
    SHARDD_ASSIGN_OR_RETURN(memory_bytes, MemoryOf(made.devices));
  }
  return ParseByteQuota("--max_bytes_per_uid", text, memory_bytes);
}

// Until the daemon is to end: the signal that says so. SIGUSR2 starts another one, which is to take its place.
// `metrics`: null: there is none.
int AwaitStop(const sigset_t& signals, Successor* successor, Handover* handover, MetricsProcess* metrics) {
  constexpr timespec kPoll = {0, 100'000'000};
  for (;;) {
    const int signal = sigtimedwait(&signals, nullptr, &kPoll);
    absl::Status status = successor->Review();
    if (signal == SIGUSR2) {
      status.Update(successor->Start());
      if (status.ok()) handover->SetState(absl::StrCat("starting: pid ", successor->pid()));
    }
    if (!status.ok()) {
      LogError(status.message());
      handover->SetState(absl::StrCat("failed: ", status.message()));
    }
    if (metrics != nullptr) metrics->Review(MonotonicNow());
    if (signal == SIGTERM || signal == SIGINT) return signal;
  }
}

absl::Status Run(const std::vector<std::string>& arguments) {
  SHARDD_ASSIGN_OR_RETURN(const std::string path, ParseUnixAddress(absl::GetFlag(FLAGS_listen)));
  const CollectiveFlags collectives = {.collective = absl::GetFlag(FLAGS_collective),
                                       .devices = absl::GetFlag(FLAGS_devices),
                                       .nccl_library = absl::GetFlag(FLAGS_nccl_library),
                                       .nccl_windows = absl::GetFlag(FLAGS_nccl_windows),
                                       .trial_file = path + ".collective",
                                       .arguments = arguments,
                                       .embedded = absl::GetFlag(FLAGS_embedded),
                                       .takes_over = absl::GetFlag(FLAGS_take_over)};
  if (absl::GetFlag(FLAGS_collective_trial)) return RunTrial(collectives);
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<MetricsProcess> metrics,
                          MetricsProcess::Create({.socket = path,
                                                  .listen = absl::GetFlag(FLAGS_metrics_listen),
                                                  .insecure = absl::GetFlag(FLAGS_metrics_insecure),
                                                  .status_page = absl::GetFlag(FLAGS_status_page),
                                                  .tls = {absl::GetFlag(FLAGS_peer_cert), absl::GetFlag(FLAGS_peer_key),
                                                          absl::GetFlag(FLAGS_peer_ca)}}));
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGUSR2);
  SetCollectiveEnvironment();  // before any other thread starts
  SHARDD_ASSIGN_OR_RETURN(Devices made, MakeDevicesWithout(signals));
  for (const std::string& warning : made.warnings) LogWarning(warning);
  const size_t device_count = made.devices.size();
  const bool on_gpus = made.driver != nullptr;
  CoreOptions options;
  SHARDD_RETURN_IF_ERROR(SetCollectives(collectives, made, &options));  // starts no thread, and a signal ends its wait
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);                        // likewise
  Successor successor(arguments);

  options.embedded = absl::GetFlag(FLAGS_embedded);
  if (options.embedded) BoundLogFile(kEmbeddedLogBytes);
  options.finish_step = absl::Milliseconds(absl::GetFlag(FLAGS_finish_step_ms));
  options.max_jobs_per_uid = absl::GetFlag(FLAGS_max_jobs_per_uid);
  SHARDD_ASSIGN_OR_RETURN(options.max_bytes_per_uid, QuotaPerUser(made));
  SHARDD_ASSIGN_OR_RETURN(options.offload_threads, OffloadThreads(absl::GetFlag(FLAGS_offload_threads)));
  options.gpus = std::move(made.gpus);
  options.device_warnings = std::move(made.warnings);
  PeerFlags of_peers = FlagsOfPeers();
  SHARDD_RETURN_IF_ERROR(CheckPeerFlags(of_peers));
  if (const std::string custodian = absl::GetFlag(FLAGS_custodian); !custodian.empty()) {
    SHARDD_ASSIGN_OR_RETURN(const std::string custody_path, ParseUnixAddress(custodian));
    if (absl::GetFlag(FLAGS_take_over)) SHARDD_RETURN_IF_ERROR(Custody::Check(custody_path));
  }
  ListenerOptions listening;
  SHARDD_ASSIGN_OR_RETURN(
      listening.view_gid,
      FindViewGroup("--view_group", absl::GetFlag(FLAGS_embedded) ? "" : absl::GetFlag(FLAGS_view_group)));
  History* history = nullptr;  // outlives the core
  if (const std::string folder = absl::GetFlag(FLAGS_history_dir); !folder.empty()) {
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<History> opened,
                            History::Open(folder, int64_t{absl::GetFlag(FLAGS_history_mib)} << 20));
    options.history = history = opened.release();
  }
  // What is wrong with flags and files is known here: the other daemon goes on then.
  if (absl::GetFlag(FLAGS_take_over)) SHARDD_RETURN_IF_ERROR(TakeOver(path));
  SHARDD_ASSIGN_OR_RETURN(options.custody, ConnectCustody(path));
  if (const std::string certificate = absl::GetFlag(FLAGS_peer_cert); !certificate.empty()) {
    options.certificate_expiry = [certificate] { return CertificateExpiry(certificate); };
  }
  SHARDD_ASSIGN_OR_RETURN(
      std::unique_ptr<PeerNetwork> made_network,
      ListenForPeers(&of_peers, absl::GetFlag(FLAGS_take_over) ? kFormerDaemon : absl::ZeroDuration()));
  options.peer_address = of_peers.address;
  PeerNetwork* const network = made_network.release();  // outlives the core, which is never destroyed
  if (network != nullptr) {
    options.join_nodes = [network](const PeerJoin& join, PeerLinks::Events* events) {
      return network->Join(join, events);
    };
  }
  options.on_idle = [] { kill(getpid(), SIGTERM); };
  // Never destroyed: the process ends after the shutdown, and a hung GPU would block the release of the driver's
  // resources.
  Core* const core = new Core(options, std::move(made.devices));
  SHARDD_RETURN_IF_ERROR(core->TakeUp());  // the custodian has all jobs still
  Handover handover(core, options.custody, options.embedded, options.on_idle);
  PeerRegistry peers;
  std::vector<GrpcServer::NamedService> services;
  services.push_back({v1::TrainerService::service_full_name(), std::make_unique<TrainerService>(core, &peers)});
  services.push_back({v1::JobsService::service_full_name(),
                      std::make_unique<JobsService>(core, &peers, geteuid(), &handover, history)});
  GrpcServerOptions serving;
  serving.reflection = absl::GetFlag(FLAGS_reflection) ? &peers : nullptr;
  serving.channelz = absl::GetFlag(FLAGS_channelz);
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<GrpcServer> server, GrpcServer::Create(std::move(services), serving));
  if (rlimit files{}; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    // One uid's connections (four descriptors each) leave room for sessions (ten each) and for everybody else.
    listening.max_connections_per_uid = std::min<size_t>(listening.max_connections_per_uid, files.rlim_cur / 8);
    // Descriptors in flight count against the same limit; half of it is enough for them. GPUs' slabs have many pieces,
    // each with a descriptor.
    const size_t per_answer = on_gpus ? size_t{kMaxFdsAtOnce} : size_t{kSessionFdCount};
    listening.max_unread = std::max<size_t>(2, std::min<size_t>(listening.max_unread, files.rlim_cur / 2 / per_answer));
    listening.max_unread_per_uid = std::min(listening.max_unread_per_uid, listening.max_unread / 2);
  }
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Listener> listener,
                          Listener::Create(
                              path, server->server(), &peers,
                              [core](FdRequest request, PeerCredentials peer, const FdReply& reply) {
                                core->FetchFds(std::move(request), peer, reply);
                              },
                              listening));
  LogInfo(absl::StrCat("shardd ", kVersion, " listens on ", path, " with ", device_count, " device(s)"));
  Notify(absl::StrCat("READY=1\nSTATUS=listens on ", path, " with ", device_count, " device(s)"));

  const int signal = AwaitStop(signals, &successor, &handover, metrics.get());
  LogInfo(absl::StrCat("signal ", signal, ": shutting down"));
  if (!handover.asked()) Notify("STOPPING=1");
  handover.BeginStop();
  ::signal(SIGUSR2, SIG_IGN);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second signal must be able to end a shutdown that hangs
  if (metrics != nullptr) metrics->Terminate();
  // It ends all sessions, so that their streams can finish.
  core->Shutdown([&listener] { listener->Stop(); },
                 [&handover, network](bool is_quiet) {
                   if (network != nullptr) network->StopListening();  // the next daemon does, as soon as it is told
                   handover.Complete(is_quiet);
                 });
  (void)AwaitSessionStreams(kLastWords);
  server->Shutdown(kShutdownGrace);
  if (history != nullptr) history->Flush(kLastWords);
  if (!handover.asked()) {
    successor.Terminate();
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(successor.AwaitListening(path));  // else the service manager starts another one
  if (successor.pid() != 0) Notify(absl::StrCat("MAINPID=", successor.pid()));
  return absl::OkStatus();
}

constexpr absl::string_view kUsage = "shardd: fully sharded data parallel training as a service; one daemon per node";

}  // namespace
}  // namespace shardd

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  shardd::ParseFlags(shardd::kUsage, "server/main.cc", argc, argv);
  if (const std::string level = absl::GetFlag(FLAGS_log_level); !level.empty() && !shardd::SetLogLevel(level)) {
    shardd::LogError(absl::StrCat("--log_level: unknown level (got \"", level, "\")"));
    return 2;
  }
  for (const int number : {SIGPIPE, SIGXFSZ}) signal(number, SIG_IGN);  // writes fail instead
  // Each trainer takes about ten descriptors; the usual soft limit of 1024 is for programs that use select.
  if (rlimit files{}; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  const absl::Status status = shardd::Run(arguments);
  if (!status.ok()) {
    shardd::LogError(status.ToString());
  }
  // Threads of gRPC and of drivers that do not return are left alone; nothing else can be done.
  _exit(status.ok() ? 0 : 1);
}
