#include "server/job/trace/job_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "server/device/device.h"
#include "server/device/traced_device.h"
#include "server/job/membership/sessions.h"
#include "server/job/memory_account.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/loop/core_loop.h"
#include "server/observe/trace_sink.h"
#include "server/session/session.h"

namespace shardd {
namespace {

// After the commit of the last step: the calls that its ranks are returning from.
constexpr absl::Duration kLastCalls = absl::Seconds(1);
constexpr int kSpansPerMessage = 512;
constexpr absl::Duration kInterval = absl::Milliseconds(2);

}  // namespace

v1::TraceStart JobTrace::Start() const {
  v1::TraceStart start;
  start.set_job(see_.job);
  start.set_world_size(see_.plan->world_size);
  start.set_version(kVersion);
  for (int rank = 0; rank < see_.plan->world_size; ++rank) {
    const Session* session = (*see_.sessions)[rank].get();
    start.add_devices((*see_.devices)[static_cast<size_t>(rank)]->name());
    start.add_pids(session == nullptr ? 0 : session->peer.pid);
  }
  see_.memory->Describe(start.mutable_memory());
  return start;
}

void JobTrace::Begin(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) {
  constexpr int kDefaultSteps = 3;
  constexpr int64_t kDefaultTimeoutMs = 60'000;
  v1::TraceStart start = Start();
  const int64_t committed_step = committed_step_ = see_.committed->step();
  const auto& sessions = see_.sessions->by_rank();
  const bool polled = on();
  if (polled) {  // what was lost until now is not lost to this one
    TakeCallsOfAll(sessions);
    TakeWork();
  } else {
    for (const auto& session : sessions) {
      if (session != nullptr) {
        session->trace().Drop();  // of an earlier trace
      }
    }
    if (work_ != nullptr) {
      (void)work_->Take();
    }
  }
  for (const auto& session : sessions) {
    if (session != nullptr) {
      session->trace().SetTracing(true);
    }
  }
  if (work_ != nullptr) {
    work_->SetOn(true);
  }
  auto trace = std::make_unique<Trace>();
  trace->sink = std::move(sink);
  trace->steps = request.steps() == 0 ? kDefaultSteps : request.steps();
  trace->timeout_ms = request.timeout_ms() == 0 ? kDefaultTimeoutMs : request.timeout_ms();
  trace->deadline = MonotonicNow() + absl::Milliseconds(trace->timeout_ms);
  trace->begin_ns = TraceNowNs();
  trace->committed_step = committed_step;
  trace->seen_in.assign(ranks_.size(), -1);
  start.set_begin_ns(trace->begin_ns);
  start.set_begin_unix_us(absl::ToUnixMicros(absl::Now()));
  start.set_committed_step(committed_step);
  v1::TraceJobResponse first;
  *first.mutable_start() = std::move(start);
  trace->sink->Send(first);
  for (Rank& rank : ranks_) {
    rank.submitted_ns.resize(see_.plan->gradient_slots.size(), 0);
    rank.closed_step = 0;
  }
  traces_.push_back(std::move(trace));
  if (!polled) {
    PollLater();
  }
}

void JobTrace::PollLater() {
  keep_->loop()->AddTimer(MonotonicNow() + kInterval, [this, weak = std::weak_ptr<void>(keep_->Keep())] {
    if (const std::shared_ptr<void> job = weak.lock(); job != nullptr && on()) {
      Poll();
      if (on()) PollLater();
    }
  });
}

void JobTrace::Complete(v1::TraceEnd* end) const {
  see_.memory->Describe(end->mutable_memory());
  for (int rank = 0; rank < see_.plan->world_size && end->reason() == v1::TRACE_END_REASON_TIMEOUT; ++rank) {
    if (const std::string waits = see_.wait_text(rank); !waits.empty()) {
      end->set_text(absl::StrCat(end->text(), "; rank ", rank, " waits for ", waits));
    }
  }
}

void JobTrace::Add(const v1::TraceSpan& span) {
  for (const auto& trace : traces_) {
    if (span.begin_ns() < trace->begin_ns) {
      continue;
    }
    *trace->pending.add_spans() = span;
    if (trace->pending.spans_size() >= kSpansPerMessage) {
      Flush(*trace);
    }
  }
}

void JobTrace::Flush(Trace& trace) {
  const int spans = trace.pending.spans_size();
  if (spans == 0) {
    return;
  }
  v1::TraceJobResponse message;
  message.mutable_spans()->Swap(&trace.pending);
  if (!trace.sink->Send(message)) {
    trace.lost += spans;
  }
}

void JobTrace::Poll() {
  const auto& sessions = see_.sessions->by_rank();
  const Describe describe = [this](v1::TraceEnd* end) { Complete(end); };
  TakeCallsOfAll(sessions);
  TakeWork();
  const absl::Time now = MonotonicNow();
  for (const auto& trace : traces_) {
    Flush(*trace);
    if (trace->last_step > 0) {
      const bool returned = std::all_of(sessions.begin(), sessions.end(), [&](const auto& session) {
        return session == nullptr || ranks_[static_cast<size_t>(session->rank())].closed_step >= trace->last_step;
      });
      if (returned || now >= trace->last_calls) {
        End(*trace, v1::TRACE_END_REASON_STEPS, absl::StrCat(trace->steps, " steps are there"), describe);
      }
    } else if (now >= trace->deadline) {
      End(*trace, v1::TRACE_END_REASON_TIMEOUT,
          absl::StrCat("the time is over (", trace->timeout_ms, " ms, ", trace->steps, " steps wanted)"), describe);
    }
  }
  std::erase_if(traces_, [](const auto& trace) { return trace->sink == nullptr || trace->sink->gone(); });
  Review(sessions);
}

int64_t JobTrace::FirstWholeStep(const Trace& trace) const {
  int64_t latest = -1;
  for (const int64_t step : trace.seen_in) {
    if (step < 0) {
      return 0;
    }
    latest = std::max(latest, step);
  }
  return latest + 1;
}

void JobTrace::End(Trace& trace, v1::TraceEndReason reason, const std::string& text, const Describe& describe) {
  Flush(trace);
  const int64_t first = FirstWholeStep(trace);
  v1::TraceJobResponse last;
  v1::TraceEnd& end = *last.mutable_end();
  end.set_reason(reason);
  end.set_text(text);
  end.set_first_step(first > 0 ? first : trace.committed_step + 1);
  end.set_last_step(trace.last_step > 0 ? trace.last_step : trace.committed_step);
  end.set_lost_spans(trace.lost);
  end.set_refused_records(trace.refused);
  if (describe != nullptr) {
    describe(&end);
  }
  trace.sink->Send(last);
  trace.sink->Finish(absl::OkStatus());
  trace.sink = nullptr;
}

void JobTrace::EndAll(const std::string& why) {
  TakeWork();
  for (const auto& trace : traces_) {
    if (trace->last_step > 0) {
      End(*trace, v1::TRACE_END_REASON_STEPS, absl::StrCat(trace->steps, " steps are there"), nullptr);
    } else {
      End(*trace, v1::TRACE_END_REASON_JOB_ENDED, why, nullptr);
    }
  }
  traces_.clear();
  Review({});
}

void JobTrace::Review(const std::vector<std::unique_ptr<Session>>& sessions) {
  if (on()) {
    return;
  }
  for (const auto& session : sessions) {
    if (session != nullptr) {
      session->trace().SetTracing(false);
    }
  }
  for (Rank& rank : ranks_) {
    std::fill(rank.submitted_ns.begin(), rank.submitted_ns.end(), 0);
  }
  if (work_ != nullptr) {
    work_->SetOn(false);
    (void)work_->Take();
  }
}

void JobTrace::Submitted(int rank, int group) {
  const int slot = see_.plan->groups[static_cast<size_t>(group)].gradient_slot;
  if (on() && slot >= 0) {
    ranks_[static_cast<size_t>(rank)].submitted_ns[static_cast<size_t>(slot)] = TraceNowNs();
  }
}

void JobTrace::Released(int rank, int slot) {
  if (on()) {
    ranks_[static_cast<size_t>(rank)].submitted_ns[static_cast<size_t>(slot)] = 0;
  }
}

void JobTrace::Reduced(int rank, int group, int64_t step) {
  const int slot = see_.plan->groups[static_cast<size_t>(group)].gradient_slot;
  if (!on() || slot < 0) {
    return;
  }
  const int64_t begin_ns = std::exchange(ranks_[static_cast<size_t>(rank)].submitted_ns[static_cast<size_t>(slot)], 0);
  if (begin_ns == 0) {
    return;  // submitted before anybody traced
  }
  v1::TraceSpan span;
  span.set_kind(v1::TRACE_KIND_REDUCE);
  span.set_rank(rank);
  span.set_group(group);
  span.set_step(step);
  span.set_slot(slot);
  span.set_begin_ns(begin_ns);
  span.set_end_ns(TraceNowNs());
  Add(span);
}

void JobTrace::Awaited(int64_t step, int rank, absl::Duration together) {
  if (!on() || rank < 0) return;
  awaited_ = {step, absl::StrCat("others waited for rank ", rank, ", together ", absl::FormatDuration(together))};
}

void JobTrace::Committed(int64_t step, const std::vector<std::unique_ptr<Session>>& sessions) {
  committed_step_ = step;
  if (!on()) {
    last_commit_ns_ = 0;
    return;
  }
  TakeCallsOfAll(sessions);
  const int64_t now_ns = TraceNowNs();
  for (const auto& trace : traces_) {
    v1::TraceSpan* span = trace->pending.add_spans();
    span->set_kind(v1::TRACE_KIND_STEP);
    span->set_rank(-1);
    span->set_group(-1);
    span->set_step(step);
    span->set_begin_ns(std::max(trace->begin_ns, last_commit_ns_));
    span->set_end_ns(now_ns);
    if (awaited_.first == step) span->set_label(awaited_.second);
    trace->committed_step = step;
    const int64_t first = FirstWholeStep(*trace);
    if (first > 0 && trace->last_step == 0 && step >= first + trace->steps - 1) {
      trace->last_step = step;
      trace->last_calls = MonotonicNow() + kLastCalls;
    }
  }
  last_commit_ns_ = now_ns;
}

}  // namespace shardd
