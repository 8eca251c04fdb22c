#include "client/ctl/top.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/format.h"
#include "client/ctl/table.h"
#include "common/figures/figures.h"
#include "nlohmann/json.hpp"

namespace shardd::ctl {
namespace {

using Json = nlohmann::ordered_json;

// From here on a slow rank is worth a colour; the alert SharddStraggler begins there too.
constexpr double kSlowShare = 0.2;
constexpr double kLittleGoodput = 0.8;

bool IsSame(const v1::JobMetrics& a, const v1::JobMetrics& b) { return a.name() == b.name() && a.uid() == b.uid(); }

JobFigures FiguresIn(const TopAnswers& answers, const v1::JobMetrics& job) {
  const v1::JobMetrics* before = nullptr;
  if (answers.before != nullptr) {
    for (const v1::JobMetrics& other : answers.before->jobs()) {
      if (IsSame(other, job)) before = &other;
    }
  }
  return FiguresOf(job, before);
}

int AttachedOf(const v1::JobMetrics& job) {
  return static_cast<int>(std::count_if(job.ranks().begin(), job.ranks().end(),
                                        [](const v1::RankMetrics& rank) { return rank.last_heard_ns() >= 0; }));
}
int64_t InterruptionsOf(const v1::JobMetrics& job) {
  int64_t count = 0;
  for (const v1::InterruptionCount& each : job.interruptions()) count += each.count();
  return count;
}

std::string Percent(double share) { return share < 0 ? "-" : absl::StrFormat("%.1f %%", 100 * share); }
std::string Took(double seconds) { return seconds < 0 ? "-" : FormatMicros(static_cast<int64_t>(seconds * 1e6)); }
std::string Ago(int64_t ns) { return ns < 0 ? "-" : FormatMicros(ns / 1000); }
std::string Pace(double steps_per_s) { return steps_per_s > 0 ? absl::StrFormat("%.3g", steps_per_s) : "-"; }

Cell SlowestCell(const Straggler& slowest) {
  if (slowest.rank < 0 || slowest.share <= 0) return "-";
  return Cell(absl::StrCat("rank ", slowest.rank, ", ", Percent(slowest.share)),
              slowest.share >= kSlowShare ? Tone::kWarning : Tone::kPlain);
}
Cell GoodputCell(double goodput) {
  return Cell(Percent(goodput), goodput >= 0 && goodput < kLittleGoodput ? Tone::kWarning : Tone::kPlain);
}
Cell RanksCell(const v1::JobMetrics& job) {
  const int attached = AttachedOf(job);
  return Cell(absl::StrCat(attached, "/", job.world_size()),
              attached == job.world_size() ? Tone::kPlain : Tone::kWarning);
}
Cell InterruptionsCell(const v1::JobMetrics& job) {
  const int64_t count = InterruptionsOf(job);
  return Cell(absl::StrCat(count), count == 0 ? Tone::kPlain : Tone::kWarning);
}
Cell RankStateCell(v1::RankState state) {
  return Cell(ShortEnumName(state), state == v1::RANK_STATE_ABSENT      ? Tone::kBad
                                    : state == v1::RANK_STATE_ATTACHING ? Tone::kWarning
                                                                        : Tone::kGood);
}

std::string DaemonLine(const v1::DaemonMetrics& daemon, size_t jobs, const View& view) {
  const int64_t up_ms = std::max<int64_t>(0, absl::ToUnixMillis(view.now) - daemon.start_time_unix_ms());
  std::string line =
      absl::StrCat("shardd ", Printable(daemon.version()), ", up ", FormatMillis(up_ms), ", ", jobs,
                   jobs == 1 ? " job, " : " jobs, ",
                   daemon.free_memory_bytes() < 0 ? "-" : FormatMiB(daemon.free_memory_bytes()), " of memory free");
  for (const v1::DeviceHealth& device : daemon.devices()) {
    if (!device.lost().empty()) absl::StrAppend(&line, ", ", Printable(device.device()), " is lost");
  }
  return absl::StrCat(line, "\n");
}

// Ranks that an operator looks for, first: absent ones, then by how much others wait for them.
std::vector<int> OfInterest(const v1::ListRanksResponse& ranks, const std::vector<double>& awaited, size_t rows) {
  std::vector<int> chosen(static_cast<size_t>(ranks.ranks_size()));
  for (int rank = 0; rank < ranks.ranks_size(); ++rank) chosen[static_cast<size_t>(rank)] = rank;
  if (rows == 0 || chosen.size() <= rows) return chosen;
  const auto weight = [&](int rank) {
    const v1::Rank& of = ranks.ranks(rank);
    if (of.state() == v1::RANK_STATE_ABSENT || of.state() == v1::RANK_STATE_ATTACHING) return 3.0;
    const auto at = static_cast<size_t>(rank);
    // One that waits for nobody is what the others wait for now.
    return (at < awaited.size() ? awaited[at] : 0) + (of.waiting_for().empty() ? 1.0 : 0.0);
  };
  std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) { return weight(a) > weight(b); });
  chosen.resize(rows);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

std::string RankLines(const v1::JobMetrics& job, const JobFigures& figures, const v1::ListRanksResponse& ranks,
                      int rows, const View& view) {
  Table table({{"RANK", Align::kRight},
               {"STATE"},
               {"DEVICE"},
               {"PID", Align::kRight},
               {"HEARD", Align::kRight},
               {"AWAITED", Align::kRight},
               {"LAST COMMAND"},
               {"WAITING FOR"}});
  const std::vector<int> chosen = OfInterest(ranks, figures.awaited, static_cast<size_t>(std::max(0, rows)));
  for (const int number : chosen) {
    const v1::Rank& rank = ranks.ranks(number);
    const auto at = static_cast<size_t>(number);
    const double own = at < figures.awaited.size() ? figures.awaited[at] : 0;
    const double share = number == figures.slowest.rank ? figures.slowest.share : own;
    const bool is_known = number < job.ranks_size();
    table.AddRow({absl::StrCat(number), RankStateCell(rank.state()), rank.device(),
                  rank.pid() == 0 ? std::string("-") : absl::StrCat(rank.pid()),
                  Ago(is_known ? job.ranks(number).last_heard_ns() : -1),
                  Cell(share > 0 ? Percent(share) : "-", share >= kSlowShare ? Tone::kWarning : Tone::kPlain),
                  rank.last_command().empty() ? "-" : rank.last_command(),
                  rank.waiting_for().empty() ? "-" : rank.waiting_for()});
  }
  const size_t left = static_cast<size_t>(ranks.ranks_size()) - chosen.size();
  return absl::StrCat(table.Render(view.color),
                      left == 0 ? "" : absl::StrCat("and ", left, left == 1 ? " more rank\n" : " more ranks\n"));
}

Json JobJson(const v1::JobMetrics& job, const JobFigures& figures) {
  const auto or_null = [](bool is_there, Json value) { return is_there ? std::move(value) : Json(nullptr); };
  Json phases = Json::object();
  for (size_t i = 0; i < kPhaseNames.size(); ++i) phases[kPhaseNames[i]] = figures.phases_s[i];
  const double goodput = GoodputOf(job.time());
  return {{"name", job.name()},
          {"uid", job.uid()},
          {"state", ShortEnumName(job.state())},
          {"ranks", job.world_size()},
          {"attached_ranks", AttachedOf(job)},
          {"committed_step", job.committed_step()},
          {"step_seconds", or_null(figures.step_s >= 0, figures.step_s)},
          {"phase_seconds", std::move(phases)},
          {"steps_per_second", figures.steps_per_s},
          {"goodput", or_null(goodput >= 0, goodput)},
          {"lost_work_seconds", LostSecondsOf(job.time())},
          {"interruptions", InterruptionsOf(job)},
          {"slowest_rank", or_null(figures.slowest.rank >= 0, figures.slowest.rank)},
          {"slowest_rank_share", figures.slowest.share},
          {"memory_bytes", job.memory().allocated_bytes()},
          {"planned_memory_bytes", job.memory().planned_bytes()},
          {"since_commit_seconds",
           or_null(job.time().since_commit_ns() >= 0, static_cast<double>(job.time().since_commit_ns()) / 1e9)}};
}

}  // namespace

std::string ShowTop(const TopAnswers& answers, const View& view) {
  std::string text = DaemonLine(answers.now.daemon(), static_cast<size_t>(answers.now.jobs_size()), view);
  if (answers.now.jobs().empty()) return absl::StrCat(text, "no jobs\n");
  Table table({{"JOB"},
               {"UID", Align::kRight},
               {"STATE"},
               {"RANKS", Align::kRight},
               {"STEP", Align::kRight},
               {"STEP TIME", Align::kRight},
               {"STEPS/S", Align::kRight},
               {"GOODPUT", Align::kRight},
               {"SLOWEST, AWAITED"},
               {"MEMORY", Align::kRight},
               {"INTERRUPTIONS", Align::kRight},
               {"LAST COMMIT", Align::kRight}});
  for (const v1::JobMetrics& job : answers.now.jobs()) {
    const JobFigures figures = FiguresIn(answers, job);
    table.AddRow({job.name(), absl::StrCat(job.uid()), ShortEnumName(job.state()), RanksCell(job),
                  absl::StrCat(job.committed_step()), Took(figures.step_s), Pace(figures.steps_per_s),
                  GoodputCell(GoodputOf(job.time())), SlowestCell(figures.slowest),
                  FormatMiB(job.memory().allocated_bytes()), InterruptionsCell(job),
                  Ago(job.time().since_commit_ns())});
  }
  return absl::StrCat(text, table.Render(view.color));
}

std::string ShowTop(const TopAnswers& answers, const v1::JobMetrics& job, const v1::ListRanksResponse& ranks, int rows,
                    const View& view) {
  const JobFigures figures = FiguresIn(answers, job);
  KeyValues out;
  out.Add("job", absl::StrCat(job.name(), " (uid ", job.uid(), "), ", ShortEnumName(job.state())));
  out.Add("ranks", RanksCell(job));
  out.Add("step", absl::StrCat(job.committed_step(), ", the last commit ", Ago(job.time().since_commit_ns()), " ago"));
  std::string phases;
  for (size_t i = 0; i < kPhaseNames.size(); ++i) {
    absl::StrAppend(&phases, i == 0 ? "" : ", ", kPhaseNames[i], " ", Took(figures.phases_s[i]));
  }
  out.Add("step time", figures.step_s < 0
                           ? Cell("-")
                           : Cell(absl::StrCat(Took(figures.step_s), ", ", Pace(figures.steps_per_s), " a second")));
  out.Add("of that", figures.step_s < 0 ? "-" : phases);
  out.Add("goodput", GoodputCell(GoodputOf(job.time())));
  out.Add("lost work", absl::StrCat(Took(LostSecondsOf(job.time())), " in ", InterruptionsOf(job), " interruptions"));
  out.Add("slowest, awaited", SlowestCell(figures.slowest));
  out.Add("memory", absl::StrCat(FormatMiB(job.memory().allocated_bytes()), " of ",
                                 FormatMiB(job.memory().planned_bytes()), " planned"));
  return absl::StrCat(out.Render(view.color), "\n", RankLines(job, figures, ranks, rows, view));
}

std::string TopJson(const TopAnswers& answers, const v1::JobMetrics* job, const v1::ListRanksResponse* ranks) {
  Json jobs = Json::array();
  for (const v1::JobMetrics& each : answers.now.jobs()) {
    if (job != nullptr && !IsSame(each, *job)) continue;
    const JobFigures figures = FiguresIn(answers, each);
    Json described = JobJson(each, figures);
    if (ranks != nullptr) {
      Json& list = described["rank"] = Json::array();
      for (const v1::Rank& rank : ranks->ranks()) {
        const auto at = static_cast<size_t>(rank.rank());
        list.push_back({{"rank", rank.rank()},
                        {"state", ShortEnumName(rank.state())},
                        {"pid", rank.pid()},
                        {"last_command", rank.last_command()},
                        {"waiting_for", rank.waiting_for()},
                        {"awaited_share", at < figures.awaited.size() ? figures.awaited[at] : 0}});
      }
    }
    jobs.push_back(std::move(described));
  }
  const Json all = {{"version", answers.now.daemon().version()},
                    {"free_memory_bytes", answers.now.daemon().free_memory_bytes()},
                    {"jobs", std::move(jobs)}};
  return all.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace shardd::ctl
