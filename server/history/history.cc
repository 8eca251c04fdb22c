#include "server/history/history.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"
#include "google/protobuf/util/json_util.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int kDefaultLines = 1000;
constexpr int kMostLines = 10'000;

void AddTo(const v1::HistoryStep& step, v1::HistoryStep* sum) {
  v1::StepRecord* const times = sum->mutable_times();
  const v1::StepRecord& more = step.times();
  // What stands for all steps of a line is the last one's.
  const v1::StepRecord before = *times;
  *sum->mutable_times() = more;
  times->set_duration_ns(before.duration_ns() + more.duration_ns());
  times->set_forward_ns(before.forward_ns() + more.forward_ns());
  times->set_backward_ns(before.backward_ns() + more.backward_ns());
  times->set_optimizer_ns(before.optimizer_ns() + more.optimizer_ns());
  times->set_waiting_ns(before.waiting_ns() + more.waiting_ns());
  times->set_reduction_ns(before.reduction_ns() + more.reduction_ns());
  times->set_commit_ns(before.commit_ns() + more.commit_ns());
  if (before.slowest_rank_ns() > more.slowest_rank_ns()) {
    times->set_slowest_rank(before.slowest_rank());
    times->set_slowest_rank_ns(before.slowest_rank_ns());
  }
  sum->set_steps(sum->steps() + 1);
  sum->set_grad_norm(step.grad_norm());
  sum->set_clip_factor(step.clip_factor());
  sum->set_memory_bytes(step.memory_bytes());
}

v1::HistoryLine LineOf(absl::string_view job, const Tenant& owner) {
  v1::HistoryLine line;
  line.set_job(std::string(job));
  line.set_uid(owner.uid);
  line.set_has_secret(owner.secret.has_value());
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<History>> History::Open(const std::string& folder, int64_t most_bytes) {
  SHARDD_ASSIGN_OR_RETURN(HistoryFiles files, HistoryFiles::Open(folder, most_bytes));
  return std::unique_ptr<History>(new History(folder, std::move(files)));
}

History::History(std::string folder, HistoryFiles files) : folder_(std::move(folder)), files_(std::move(files)) {}

History::~History() {
  Flush();
  thread_.Stop();
}

void History::Flush(absl::Duration limit) {
  thread_.RunAndWait([this] { WriteAll(); }, limit);
}

void History::WriteAll() {
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [job, steps] : steps_) SaySteps(&steps);
    steps_.clear();
  }
  Write();
}

void History::Say(const v1::HistoryLine& line) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(line, &text).ok()) return;  // a name that is no UTF-8
  if (waiting_.size() + text.size() > kMostWaitingBytes) {
    ++dropped_;
    return;
  }
  if (waiting_.empty()) thread_.Post([this] { Write(); });
  absl::StrAppend(&waiting_, text, "\n");
}

void History::SaySteps(Steps* steps) {
  if (!steps->line.has_step()) return;
  Say(steps->line);
  steps->line.clear_step();
}

void History::KeepStep(absl::string_view job, const Tenant& owner, const v1::HistoryStep& step) {
  const absl::Time now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  const auto [it, is_new] = steps_.try_emplace(Job(job, owner.uid));
  Steps& steps = it->second;
  if (is_new) steps.line = LineOf(job, owner);
  if (!steps.line.has_step()) steps.since = now;
  AddTo(step, steps.line.mutable_step());
  steps.line.set_time_unix_ms(absl::ToUnixMillis(absl::Now()));
  if (now - steps.since >= kPerLine || absl::Nanoseconds(step.times().duration_ns()) >= kPerLine) SaySteps(&steps);
}

void History::KeepEvent(const v1::Event& event, const Tenant& owner) {
  v1::HistoryLine line = LineOf(event.job(), owner);
  line.set_time_unix_ms(event.unix_us() / 1000);
  *line.mutable_event() = event;
  absl::MutexLock lock(&mutex_);
  if (const auto it = steps_.find(Job(event.job(), owner.uid)); it != steps_.end()) {
    SaySteps(&it->second);  // what was before is before it there
    steps_.erase(it);
  }
  Say(line);
}

void History::Write() {
  std::string lines;
  int64_t dropped = 0;
  {
    absl::MutexLock lock(&mutex_);
    lines.swap(waiting_);
    std::swap(dropped, dropped_);
  }
  if (lines.empty()) return;
  if (dropped > 0) LogWarning(absl::StrCat("history: ", dropped, " lines were dropped: ", folder_, " is too slow"));
  const absl::Status status = files_.Append(lines);
  if (!status.ok() && written_.ok()) LogWarning(absl::StrCat("history: lines are lost: ", status.message()));
  if (status.ok() && !written_.ok()) LogInfo(absl::StrCat("history: lines are written again in ", folder_));
  written_ = status;
}

void History::List(v1::ListHistoryRequest request, uint32_t uid, bool sees_all,
                   std::function<void(v1::ListHistoryResponse)> done) {
  thread_.Post([this, request = std::move(request), uid, sees_all, done = std::move(done)] {
    WriteAll();
    done(Read(request, uid, sees_all));
  });
}

v1::ListHistoryResponse History::Read(const v1::ListHistoryRequest& request, uint32_t uid, bool sees_all) const {
  const int limit = request.limit() == 0 ? kDefaultLines : std::min(request.limit(), kMostLines);
  std::vector<v1::HistoryLine> newest;
  v1::ListHistoryResponse response;
  google::protobuf::util::JsonParseOptions of_later_versions;
  of_later_versions.ignore_unknown_fields = true;
  HistoryFiles::ReadBackwards(folder_, [&](absl::string_view text) {
    if (request.events_only() && !absl::StrContains(text, "\"event\"")) return true;  // parsing is dear
    v1::HistoryLine line;
    if (!google::protobuf::util::JsonStringToMessage({text.data(), text.size()}, &line, of_later_versions).ok()) {
      return true;  // half of one
    }
    if (line.time_unix_ms() < request.since_unix_ms()) return false;
    if ((!request.job().empty() && line.job() != request.job()) || (request.has_uid() && line.uid() != request.uid()) ||
        (request.events_only() && !line.has_event()) || (!sees_all && (line.uid() != uid || line.has_secret()))) {
      return true;
    }
    if (newest.size() == static_cast<size_t>(limit)) {
      response.set_more(true);
      return false;
    }
    newest.push_back(std::move(line));
    return true;
  });
  for (auto it = newest.rbegin(); it != newest.rend(); ++it) *response.add_lines() = std::move(*it);
  return response;
}

}  // namespace shardd
