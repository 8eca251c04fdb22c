#include "client/ctl/history_views.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/format.h"
#include "client/ctl/table.h"

namespace shardd::ctl {
namespace {

constexpr size_t kMostAborts = 5;

Cell StepCell(const v1::HistoryStep& step) {
  const int64_t last = step.times().step();
  return step.steps() <= 1 ? absl::StrCat(last) : absl::StrCat(last - step.steps() + 1, "-", last);
}

// Of one step.
std::string Took(int64_t sum_ns, const v1::HistoryStep& step) {
  return FormatMicros(sum_ns / 1000 / std::max(1, step.steps()));
}

std::string StepText(const v1::HistoryStep& step) {
  const v1::StepRecord& times = step.times();
  std::string text =
      absl::StrCat("forward ", Took(times.forward_ns(), step), ", backward ", Took(times.backward_ns(), step),
                   ", optimizer ", Took(times.optimizer_ns(), step), ", reduction ", Took(times.reduction_ns(), step),
                   ", commit ", Took(times.commit_ns(), step), ", waited ", Took(times.waiting_ns(), step));
  if (times.slowest_rank() >= 0 && times.slowest_rank_ns() > 0)
    absl::StrAppend(&text, " for rank ", times.slowest_rank());
  if (step.grad_norm() != 0) absl::StrAppend(&text, absl::StrFormat(", norm %.4g", step.grad_norm()));
  if (step.clip_factor() != 1 && step.clip_factor() != 0) {
    absl::StrAppend(&text, absl::StrFormat(", clipped by %.4g", step.clip_factor()));
  }
  return text;
}

bool IsEnd(const v1::Event& event) { return event.kind() == "abort" || event.kind() == "epoch"; }

// One abort: events between the end of the epoch before and the one of the next are `events[from, to)`, it is at `at`.
std::string Told(const std::vector<const v1::Event*>& events, size_t at) {
  const v1::Event& abort = *events[at];
  std::string text = absl::StrCat(FormatTimeMicros(abort.unix_us()), "  step ", abort.step() + 1,
                                  abort.kind() == "abort" ? " was dropped" : " had not begun when ranks left", ": ",
                                  Printable(abort.text()), "\n");
  for (size_t i = at; i-- > 0 && !IsEnd(*events[i]);) {
    if (events[i]->kind() != "lost" && events[i]->kind() != "refused") continue;
    absl::StrAppend(&text,
                    "    before it: ", events[i]->rank() < 0 ? "" : absl::StrCat("rank ", events[i]->rank(), " "),
                    events[i]->kind(), ": ", Printable(events[i]->text()), "\n");
  }
  int64_t back_us = 0;
  int ranks = 0;
  for (size_t i = at + 1; i < events.size() && !IsEnd(*events[i]); ++i) {
    if (events[i]->kind() != "attach") continue;
    back_us = events[i]->unix_us();
    ++ranks;
  }
  absl::StrAppend(&text, "    after it: ",
                  ranks == 0 ? "nobody has come back"
                             : absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks", " attached again, the last after ",
                                            FormatMicros(std::max<int64_t>(0, back_us - abort.unix_us()))),
                  "\n");
  return text;
}

}  // namespace

std::string Show(const v1::ListHistoryResponse& history, const View& view) {
  if (history.lines().empty()) return "no history\n";
  Table table({{"TIME"}, {"JOB"}, {"STEP", Align::kRight}, {"RANK", Align::kRight}, {"WHAT"}, {"TOOK"}, {"TEXT"}});
  for (const v1::HistoryLine& line : history.lines()) {
    if (line.has_event()) {
      const v1::Event& event = line.event();
      const bool is_bad = event.kind() == "abort" || event.kind() == "lost" || event.kind() == "refused";
      table.AddRow({FormatTimeMicros(event.unix_us()), line.job(), absl::StrCat(event.step()),
                    event.rank() < 0 ? std::string("-") : absl::StrCat(event.rank()),
                    Cell(event.kind(), is_bad ? Tone::kBad : Tone::kPlain), std::string("-"), event.text()});
    } else {
      const v1::HistoryStep& step = line.step();
      table.AddRow({FormatTimeMicros(line.time_unix_ms() * 1000), line.job(), StepCell(step), std::string("-"),
                    std::string(step.steps() > 1 ? "steps" : "step"), Took(step.times().duration_ns(), step),
                    StepText(step)});
    }
  }
  return absl::StrCat(history.more() ? "(older lines are left out; --limit shows more)\n" : "",
                      table.Render(view.color));
}

std::string ShowWhy(const std::string& job, const v1::ListHistoryResponse& events) {
  std::vector<const v1::Event*> all;
  for (const v1::HistoryLine& line : events.lines()) {
    if (line.has_event()) all.push_back(&line.event());
  }
  std::vector<size_t> aborts;
  for (size_t i = 0; i < all.size(); ++i) {
    if (IsEnd(*all[i])) aborts.push_back(i);
  }
  if (aborts.empty())
    return absl::StrCat("job ", Printable(job), ": no step was dropped, and no rank left, in what is kept\n");
  std::string text =
      absl::StrCat("job ", Printable(job), ": ", aborts.size(), aborts.size() == 1 ? " end" : " ends", " of an epoch");
  absl::StrAppend(&text, aborts.size() > kMostAborts ? absl::StrCat("; the last ", kMostAborts) : "",
                  ", newest first\n");
  size_t shown = 0;
  for (auto it = aborts.rbegin(); it != aborts.rend() && shown < kMostAborts; ++it, ++shown) {
    absl::StrAppend(&text, Told(all, *it));
  }
  return text;
}

}  // namespace shardd::ctl
