// The daemon's own metrics, and those of what its jobs share.

#include <map>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/metrics/families.h"

namespace shardd {
namespace {

void AddDevices(const v1::DaemonMetrics& daemon, Families* out) {
  for (const v1::DeviceHealth& device : daemon.devices()) {
    out->Gauge("shardd_device_up", "1: the device works; 0: it is lost until the daemon is started anew.",
               {{"device", device.device()}}, device.lost().empty() ? 1 : 0);
  }
  for (const v1::Stream& stream : daemon.streams()) {
    out->Counter("shardd_device_busy_seconds_total", "Time that a device's stream spent in operations.",
                 {{"device", stream.device()}, {"stream", stream.name()}}, static_cast<double>(stream.busy_us()) / 1e6);
  }
  for (const v1::Gpu& gpu : daemon.gpus()) {
    out->Gauge("shardd_gpu_info", "1; what the GPU is, and how it was set when the daemon started.",
               {{"device", gpu.device()},
                {"description", gpu.description()},
                {"pci_bus_id", gpu.pci_bus_id()},
                {"mps", gpu.mps()},
                {"persistence_mode", gpu.persistence_mode()},
                {"compute_mode", gpu.compute_mode()}},
               1);
  }
}

void AddUsers(const v1::DaemonMetrics& daemon, Families* out) {
  for (const v1::UserQuota& user : daemon.quotas()) {
    const Families::Labels labels = {{"uid", absl::StrCat(user.uid())}};
    out->Gauge("shardd_user_jobs", "Jobs of the user.", labels, user.jobs());
    out->Gauge("shardd_user_jobs_max", "Jobs that the user may have.", labels, user.max_jobs());
    out->Gauge("shardd_user_memory_bytes", "Memory that the user's jobs were promised.", labels,
               static_cast<double>(user.planned_bytes()));
    if (user.max_bytes() == 0) continue;
    out->Gauge("shardd_user_memory_max_bytes", "Memory that the user's jobs may be promised.", labels,
               static_cast<double>(user.max_bytes()));
  }
}

// Of every state, so that a rule finds a zero and not nothing.
void AddJobStates(const v1::GetMetricsResponse& metrics, Families* out) {
  std::map<v1::JobState, int> count;
  for (const v1::JobMetrics& job : metrics.jobs()) ++count[job.state()];
  for (int number = v1::JOB_STATE_WAITING; number <= v1::JobState_MAX; ++number) {
    const auto state = static_cast<v1::JobState>(number);
    if (state == v1::JOB_STATE_CLOSED) continue;  // it is in no answer
    const std::string& name = v1::JobState_Name(state);
    out->Gauge("shardd_jobs", "Jobs of the daemon.",
               {{"state", absl::AsciiStrToLower(absl::StripPrefix(name, "JOB_STATE_"))}}, count[state]);
  }
}

}  // namespace

void AddDaemon(const v1::GetMetricsResponse& metrics, Families* out) {
  const v1::DaemonMetrics& daemon = metrics.daemon();
  out->Gauge("shardd_build_info", "1; the daemon's version.", {{"version", daemon.version()}}, 1);
  out->Gauge("shardd_start_time_seconds", "When the daemon started, since 1970.", {},
             static_cast<double>(daemon.start_time_unix_ms()) / 1e3);
  out->Histogram("shardd_loop_lag_seconds", "How late the thread that serves all jobs ran its timers.", {},
                 daemon.loop_lag());
  if (daemon.open_files() >= 0) {
    out->Gauge("shardd_open_fds", "Descriptors that the daemon has open.", {},
               static_cast<double>(daemon.open_files()));
  }
  if (daemon.max_open_files() >= 0) {
    out->Gauge("shardd_max_fds", "Descriptors that the daemon may have open.", {},
               static_cast<double>(daemon.max_open_files()));
  }
  if (daemon.free_memory_bytes() >= 0) {
    out->Gauge("shardd_free_memory_bytes", "Memory that is free for the daemon: of the host, or of its cgroup.", {},
               static_cast<double>(daemon.free_memory_bytes()));
  }
  if (daemon.certificate_expires_unix_ms() != 0) {
    out->Gauge("shardd_peer_certificate_expiry_timestamp_seconds",
               "When the daemon's certificate for other nodes expires, since 1970.", {},
               static_cast<double>(daemon.certificate_expires_unix_ms()) / 1e3);
  }
  AddDevices(daemon, out);
  AddUsers(daemon, out);
  AddJobStates(metrics, out);
}

}  // namespace shardd
