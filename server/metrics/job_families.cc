// A job's metrics: at most 500 series for each job.

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/figures/figures.h"
#include "server/metrics/families.h"

namespace shardd {
namespace {

// Ranks from here on have one series together, and nodes from here on none.
constexpr int kMostRanks = 64;
constexpr int kMostPeers = 16;

class JobFamilies {
 public:
  JobFamilies(const v1::JobMetrics& job, Families* out) : job_(job), out_(out) {}

  void AddAll() {
    AddFacts();
    AddTime();
    AddSteps();
    AddRanks();
    AddMemory();
    AddPeers();
  }

 private:
  Families::Labels With(Families::Labels more) const {
    Families::Labels labels = {{"job_name", job_.name()}, {"uid", absl::StrCat(job_.uid())}};
    labels.insert(labels.end(), more.begin(), more.end());
    return labels;
  }
  static double Seconds(int64_t ns) { return static_cast<double>(ns) / kNsOfSecond; }

  void AddFacts() {
    const v1::Counters& counters = job_.counters();
    out_->Gauge("shardd_job_world_size", "Ranks of the job.", With({}), job_.world_size());
    out_->Gauge("shardd_job_epoch", "Epoch of the job, which ends with each interruption.", With({}),
                static_cast<double>(job_.epoch()));
    out_->Gauge("shardd_job_committed_step", "Steps that are committed; smaller again where steps are taken back.",
                With({}), static_cast<double>(job_.committed_step()));
    out_->Counter("shardd_job_commands_total", "Commands of all ranks.", With({}),
                  static_cast<double>(counters.commands()));
    out_->Counter("shardd_job_reduced_bytes_total", "Gradients that were read to be reduced.", With({}),
                  static_cast<double>(counters.bytes_reduced()));
    out_->Counter("shardd_job_updated_bytes_total", "Parameters that the optimizer wrote.", With({}),
                  static_cast<double>(counters.bytes_updated()));
    out_->Counter("shardd_departures_total", "Requests out of the captured order.", With({}),
                  static_cast<double>(counters.departures()));
  }

  void AddTime() {
    const v1::JobTime& time = job_.time();
    const std::array<std::pair<const char*, int64_t>, 6> states = {{{"starting", time.starting_ns()},
                                                                    {"committed", time.committed_ns()},
                                                                    {"slow_rank", time.slow_rank_ns()},
                                                                    {"dropped", time.dropped_ns()},
                                                                    {"absent", time.absent_ns()},
                                                                    {"idle", time.idle_ns()}}};
    for (const auto& [state, ns] : states) {
      out_->Counter("shardd_job_seconds_total", "What the job's time went into.", With({{"state", state}}),
                    Seconds(ns));
    }
    out_->Counter("shardd_job_lost_work_seconds_total", "Time in work that was dropped, and in steps taken back.",
                  With({}), LostSecondsOf(time));
    out_->Counter("shardd_job_redone_seconds_total", "Time in steps that had been begun, or committed, before.",
                  With({}), Seconds(time.redone_ns()));
    if (const double goodput = GoodputOf(time); goodput >= 0) {
      out_->Gauge("shardd_job_goodput_ratio", "Share of the job's time in steps that stand, without slow ranks.",
                  With({}), goodput);
    }
    if (time.since_commit_ns() >= 0) {
      out_->Gauge("shardd_job_last_commit_age_seconds", "Time since the last commit.", With({}),
                  Seconds(time.since_commit_ns()));
    }
  }

  void AddSteps() {
    const v1::StepMetrics& steps = job_.steps();
    const std::array<std::pair<const char*, int64_t>, 4> results = {{{"committed", steps.committed()},
                                                                     {"skipped", steps.skipped()},
                                                                     {"dropped", steps.dropped()},
                                                                     {"taken_back", steps.taken_back()}}};
    for (const auto& [result, count] : results) {
      out_->Counter("shardd_job_steps_total", "Steps by what became of them.", With({{"result", result}}),
                    static_cast<double>(count));
    }
    const std::array<std::pair<const char*, const v1::Durations*>, 6> phases = {{{"forward", &steps.forward()},
                                                                                 {"backward", &steps.backward()},
                                                                                 {"waiting", &steps.waiting()},
                                                                                 {"reduction", &steps.reduction()},
                                                                                 {"optimizer", &steps.optimizer()},
                                                                                 {"commit", &steps.commit()}}};
    for (const auto& [phase, durations] : phases) {
      out_->Histogram("shardd_job_step_seconds", "Phases of committed steps, which add up to their duration.",
                      With({{"phase", phase}}), *durations);
    }
    out_->Histogram("shardd_job_step_duration_seconds", "Committed steps, from the commit before.", With({}),
                    steps.duration());
    if (!job_.collective().empty()) {  // a job that is being taken up has none yet
      out_->Histogram("shardd_collective_seconds", "Reductions of one parameter group over the job's ranks.",
                      With({{"path", job_.collective()}, {"op", "reduce_scatter"}}), job_.reductions());
    }
    for (int number = v1::InterruptionCause_MIN + 1; number <= v1::InterruptionCause_MAX; ++number) {
      const auto cause = static_cast<v1::InterruptionCause>(number);
      int64_t count = 0;
      for (const v1::InterruptionCount& each : job_.interruptions()) count += each.cause() == cause ? each.count() : 0;
      const std::string& name = v1::InterruptionCause_Name(cause);
      out_->Counter("shardd_job_interruptions_total", "Epochs that ended, after which ranks attached again.",
                    With({{"cause", absl::AsciiStrToLower(absl::StripPrefix(name, "INTERRUPTION_CAUSE_"))}}),
                    static_cast<double>(count));
    }
  }

  void AddRanks() {
    std::array<int, v1::RankState_ARRAYSIZE> count = {};
    double longest_of_others = -1;
    for (int rank = 0; rank < job_.ranks_size(); ++rank) {
      ++count[static_cast<size_t>(job_.ranks(rank).state())];
      const double age = job_.ranks(rank).last_heard_ns() < 0 ? -1 : Seconds(job_.ranks(rank).last_heard_ns());
      if (rank >= kMostRanks) longest_of_others = std::max(longest_of_others, age);
      if (rank < kMostRanks && age >= 0) AddLastHeard(absl::StrCat(rank), age);
    }
    if (longest_of_others >= 0) AddLastHeard("others", longest_of_others);
    for (int number = v1::RankState_MIN + 1; number <= v1::RankState_MAX; ++number) {
      const std::string& name = v1::RankState_Name(static_cast<v1::RankState>(number));
      out_->Gauge("shardd_ranks", "Ranks of the job by state.",
                  With({{"state", absl::AsciiStrToLower(absl::StripPrefix(name, "RANK_STATE_"))}}),
                  count[static_cast<size_t>(number)]);
    }
    const auto name = [](int rank, const char* otherwise) {
      return rank < 0 ? std::string(otherwise) : absl::StrCat(rank);
    };
    for (const v1::RankWait& wait : job_.waits()) {
      out_->Counter("shardd_job_wait_seconds_total", "Time for which a rank waited for another one, until that came.",
                    With({{"rank", name(wait.rank(), "all")}, {"for", name(wait.awaited(), "others")}}),
                    Seconds(wait.wait_ns()));
    }
  }
  void AddLastHeard(const std::string& rank, double age_s) {
    out_->Gauge("shardd_rank_last_heard_seconds", "Time since an attached rank was last heard.", With({{"rank", rank}}),
                age_s);
  }

  void AddMemory() {
    for (const v1::Purpose& purpose : job_.memory().purposes()) {
      const Families::Labels labels = With({{"purpose", purpose.purpose()}});
      out_->Gauge("shardd_job_memory_bytes", "The job's memory on this node, allocated.", labels,
                  static_cast<double>(purpose.allocated_bytes()));
      out_->Gauge("shardd_job_memory_planned_bytes", "The job's memory on this node, with all ranks attached.", labels,
                  static_cast<double>(purpose.planned_bytes()));
    }
  }

  void AddPeers() {
    int left = kMostPeers;
    for (const v1::Node& node : job_.nodes()) {
      if (node.here() || left-- <= 0) continue;
      out_->Gauge("shardd_peer_up", "1: there is a link to the daemon of the job's other node.",
                  With({{"peer", node.address()}}), node.state() == "up" ? 1 : 0);
      out_->Counter("shardd_peer_bytes_total", "Bytes over the link, without what NCCL moves.",
                    With({{"peer", node.address()}, {"direction", "sent"}}), static_cast<double>(node.bytes_sent()));
      out_->Counter("shardd_peer_bytes_total", "Bytes over the link, without what NCCL moves.",
                    With({{"peer", node.address()}, {"direction", "received"}}),
                    static_cast<double>(node.bytes_received()));
    }
  }

  const v1::JobMetrics& job_;
  Families* const out_;
};

}  // namespace

void AddJob(const v1::JobMetrics& job, Families* out) { JobFamilies(job, out).AddAll(); }

}  // namespace shardd
