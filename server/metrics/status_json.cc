#include "server/metrics/status_json.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "common/figures/figures.h"
#include "nlohmann/json.hpp"

namespace shardd {
namespace {

using Json = nlohmann::json;

double Seconds(int64_t ns) { return static_cast<double>(ns) / 1e9; }
Json OrNull(bool is_there, double value) { return is_there ? Json(value) : Json(nullptr); }

// "JOB_STATE_IDLE" as "idle".
std::string Short(absl::string_view name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

// Means and rates are of the time since the answer before.
class Writer {
 public:
  Writer(const StatusFacts& facts, const Viewer& viewer)
      : facts_(facts), viewer_(viewer), since_s_(absl::ToDoubleSeconds(facts.since_before)) {
    for (const v1::Job& job : facts.jobs.jobs()) described_[{job.name(), job.uid()}] = &job;
  }

  Json Daemon() const {
    const v1::DaemonMetrics& daemon = facts_.metrics.daemon();
    return {{"version", daemon.version()},
            {"start_unix_ms", daemon.start_time_unix_ms()},
            {"free_memory_bytes", daemon.free_memory_bytes()},
            {"open_files", daemon.open_files()},
            {"max_open_files", daemon.max_open_files()},
            {"certificate_expires_unix_ms", daemon.certificate_expires_unix_ms()},
            {"loop_lag_s", MeanSeconds(daemon.loop_lag(), facts_.before.daemon().loop_lag())},
            {"devices", Devices()}};
  }

  Json Jobs(int* hidden) const {
    Json jobs = Json::array();
    for (const v1::JobMetrics& job : facts_.metrics.jobs()) {
      // One that is not in both answers has begun or ended between them: it is, or is not, there the next time.
      const auto described = described_.find({job.name(), job.uid()});
      if (described == described_.end()) continue;
      if (viewer_.Sees(job.uid(), described->second->has_secret())) {
        jobs.push_back(JobOf(job, *described->second));
      } else {
        ++*hidden;
      }
    }
    return jobs;
  }

 private:
  static Json MeanSeconds(const v1::Durations& now, const v1::Durations& before) {
    uint64_t count = 0;
    for (const uint64_t each : now.counts()) count += each;
    for (const uint64_t each : before.counts()) count -= std::min(count, each);
    return OrNull(count > 0, Seconds(now.sum_ns() - before.sum_ns()) / static_cast<double>(count));
  }
  // Of a counter that may have begun anew.
  Json Rate(double now, double before) const {
    return OrNull(since_s_ > 0 && now >= before, (now - before) / since_s_);
  }

  Json Devices() const {
    std::map<std::pair<std::string, std::string>, int64_t> busy_us;
    for (const v1::Stream& stream : facts_.before.daemon().streams()) {
      busy_us[{stream.device(), stream.name()}] = stream.busy_us();
    }
    Json devices = Json::array();
    for (const v1::DeviceHealth& device : facts_.metrics.daemon().devices()) {
      Json described = {{"name", device.device()}, {"lost", device.lost()}, {"busy", Json::object()}};
      for (const v1::Gpu& gpu : facts_.metrics.daemon().gpus()) {
        if (gpu.device() == device.device()) described["description"] = gpu.description();
      }
      for (const v1::Stream& stream : facts_.metrics.daemon().streams()) {
        // How busy a device is tells of everybody's jobs.
        const auto before = busy_us.find({stream.device(), stream.name()});
        if (stream.device() != device.device() || !viewer_.sees_all || before == busy_us.end()) continue;
        described["busy"][stream.name()] =
            Rate(static_cast<double>(stream.busy_us()) / 1e6, static_cast<double>(before->second) / 1e6);
      }
      devices.push_back(std::move(described));
    }
    return devices;
  }

  const v1::JobMetrics* Before(const v1::JobMetrics& job) const {
    for (const v1::JobMetrics& other : facts_.before.jobs()) {
      if (other.name() == job.name() && other.uid() == job.uid()) return &other;
    }
    return nullptr;
  }

  Json Pace(const v1::JobMetrics& job, const v1::JobMetrics* before) const {
    const JobFigures figures = FiguresOf(job, before);
    Json phases = Json::object();
    for (size_t i = 0; i < kPhaseNames.size(); ++i) phases[kPhaseNames[i]] = figures.phases_s[i];
    Json awaited = Json::object();
    for (size_t rank = 0; rank < figures.awaited.size(); ++rank) {
      if (figures.awaited[rank] > 0) awaited[std::to_string(rank)] = figures.awaited[rank];
    }
    const double reduced = static_cast<double>(job.counters().bytes_reduced());
    return {
        {"step_s", OrNull(figures.step_s >= 0, figures.step_s)},
        {"phases_s", std::move(phases)},
        {"steps_per_s", figures.steps_per_s},
        {"reduced_bytes_per_s",
         before == nullptr ? Json(nullptr) : Rate(reduced, static_cast<double>(before->counters().bytes_reduced()))},
        {"slowest_rank", figures.slowest.rank < 0 ? Json(nullptr) : Json(figures.slowest.rank)},
        {"slowest_share", figures.slowest.share},
        {"awaited", std::move(awaited)}};
  }

  static Json MemoryOf(const v1::Memory& memory) {
    Json purposes = Json::array();
    for (const v1::Purpose& purpose : memory.purposes()) {
      Json devices = Json::array();
      for (const v1::DeviceBytes& device : purpose.devices()) {
        devices.push_back({{"device", device.device()}, {"bytes", device.allocated_bytes()}});
      }
      purposes.push_back({{"purpose", purpose.purpose()},
                          {"planned_bytes", purpose.planned_bytes()},
                          {"allocated_bytes", purpose.allocated_bytes()},
                          {"backing", purpose.backing()},
                          {"devices", std::move(devices)}});
    }
    return {{"planned_bytes", memory.planned_bytes()},
            {"allocated_bytes", memory.allocated_bytes()},
            {"purposes", std::move(purposes)}};
  }

  static Json NodesOf(const v1::JobMetrics& job) {
    Json nodes = Json::array();
    for (const v1::Node& node : job.nodes()) {
      nodes.push_back({{"index", node.index()},
                       {"address", node.address()},
                       {"state", node.state()},
                       {"here", node.here()},
                       {"bytes_sent", node.bytes_sent()},
                       {"bytes_received", node.bytes_received()}});
    }
    return nodes;
  }

  Json JobOf(const v1::JobMetrics& job, const v1::Job& described) const {
    std::string states;  // a digit for each rank: v1::RankState
    for (const v1::RankMetrics& rank : job.ranks()) {
      states += rank.state() >= 0 && rank.state() <= 9 ? static_cast<char>('0' + rank.state()) : '0';
    }
    Json interruptions = Json::object();
    for (const v1::InterruptionCount& each : job.interruptions()) {
      interruptions[Short(v1::InterruptionCause_Name(each.cause()), "INTERRUPTION_CAUSE_")] = each.count();
    }
    const double goodput = GoodputOf(job.time());
    return {{"name", job.name()},
            {"uid", job.uid()},
            {"has_secret", described.has_secret()},
            {"state", Short(v1::JobState_Name(job.state()), "JOB_STATE_")},
            {"world_size", job.world_size()},
            {"attached_ranks", described.attached_ranks()},
            {"rank_states", std::move(states)},
            {"epoch", job.epoch()},
            {"step", job.committed_step()},
            {"created_unix_ms", described.created_unix_ms()},
            {"parameters", described.parameters_numel()},
            {"groups", described.groups()},
            {"collective", job.collective()},
            {"departures", job.counters().departures()},
            {"goodput", OrNull(goodput >= 0, goodput)},
            {"lost_work_s", LostSecondsOf(job.time())},
            {"since_commit_s", OrNull(job.time().since_commit_ns() >= 0, Seconds(job.time().since_commit_ns()))},
            {"interruptions", std::move(interruptions)},
            {"pace", Pace(job, Before(job))},
            {"memory", MemoryOf(job.memory())},
            {"nodes", NodesOf(job)}};
  }

  const StatusFacts& facts_;
  const Viewer& viewer_;
  const double since_s_;
  std::map<std::pair<std::string, uint32_t>, const v1::Job*> described_;
};

Json Incidents(const std::vector<Incident>& incidents, const Viewer& viewer) {
  Json shown = Json::array();
  for (const Incident& incident : incidents) {
    if (!viewer.Sees(incident.uid, incident.has_secret)) continue;
    const v1::Event& event = incident.event;
    shown.push_back({{"unix_ms", event.unix_us() / 1000},
                     {"job", event.job()},
                     {"step", event.step()},
                     {"rank", event.rank() < 0 ? Json(nullptr) : Json(event.rank())},
                     {"kind", event.kind()},
                     {"text", event.text()}});
  }
  return shown;
}

Json Selected(const SelectedRanks& selected) {
  Json ranks = Json::array();
  for (const v1::Rank& rank : selected.ranks.ranks()) {
    ranks.push_back({{"state", Short(v1::RankState_Name(rank.state()), "RANK_STATE_")},
                     {"device", rank.device()},
                     {"pid", rank.pid()},
                     {"last", rank.last_command()},
                     {"age_ms", rank.last_command_age_ms()},
                     {"waits", rank.waiting_for()}});
  }
  return {{"job", selected.job}, {"uid", selected.uid}, {"ranks", std::move(ranks)}};
}

Json ViewerJson(const Viewer& viewer) {
  return {{"sees", viewer.sees_all ? "all" : viewer.uid.has_value() ? "own" : "none"}, {"why", viewer.why}};
}

// Texts that are no UTF-8 would be an exception otherwise.
std::string Written(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

bool IsIncident(const v1::Event& event) {
  const std::string& kind = event.kind();
  return kind == "abort" || kind == "epoch" || kind == "lost" || kind == "refused";
}

std::string StatusJson(const StatusFacts& facts, const std::vector<Incident>& incidents, const SelectedRanks* selected,
                       const Viewer& viewer) {
  const Writer writer(facts, viewer);
  int hidden = 0;
  Json jobs = writer.Jobs(&hidden);
  const bool may_see = selected != nullptr && std::any_of(jobs.begin(), jobs.end(), [&](const Json& job) {
                         return job["name"] == selected->job && job["uid"] == selected->uid;
                       });
  return Written({{"time_unix_ms", absl::ToUnixMillis(facts.time)},
                  {"viewer", ViewerJson(viewer)},
                  {"daemon", writer.Daemon()},
                  {"jobs", std::move(jobs)},
                  {"hidden_jobs", hidden},
                  {"incidents", Incidents(incidents, viewer)},
                  {"selected", may_see ? Selected(*selected) : Json(nullptr)}});
}

std::string StatusJson(const absl::Status& error, const Viewer& viewer) {
  // Whoever is not known is not told how the daemon is reached.
  const std::string text = viewer.sees_all || viewer.uid.has_value() ? error.ToString() : "";
  return Written({{"viewer", ViewerJson(viewer)}, {"daemon", nullptr}, {"error", text}});
}

}  // namespace shardd
