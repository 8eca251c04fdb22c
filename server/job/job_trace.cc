#include "server/job/job_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

// After the commit of the last step: the calls that its ranks are returning from.
constexpr absl::Duration kLastCalls = absl::Seconds(1);
constexpr int kSpansPerMessage = 512;

}  // namespace

void JobTrace::Begin(const v1::TraceJobRequest& request, v1::TraceStart start, int64_t committed_step,
                     std::shared_ptr<TraceSink> sink, const std::vector<std::unique_ptr<Session>>& sessions) {
  constexpr int kDefaultSteps = 3;
  constexpr int64_t kDefaultTimeoutMs = 60'000;
  for (const auto& session : sessions) {
    if (session != nullptr) {
      // What lies there is of an earlier trace.
      TakeCalls(session.get());
      session->SetTracing(true);
    }
  }
  if (work_ != nullptr) {
    if (!on()) {
      (void)work_->Take();
    }
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
    rank.submitted_ns.resize(plan_->gradient_slots.size(), 0);
  }
  traces_.push_back(std::move(trace));
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

// The trainer wrote it: it may say anything.
bool JobTrace::IsPossible(const TraceRecord& record, const Rank& rank, int64_t now_ns) const {
  return record.begin_ns >= rank.last_end_ns && record.end_ns >= record.begin_ns && record.end_ns <= now_ns &&
         record.group >= -1 && record.group < static_cast<int64_t>(plan_->groups.size()) && record.step >= 0 &&
         record.call != v1::TRACE_CALL_UNSPECIFIED && v1::TraceCall_IsValid(record.call);
}

void JobTrace::TakeCalls(Session* session) {
  const int number = session->rank();
  Rank& rank = ranks_[static_cast<size_t>(number)];
  std::vector<TraceRecord> records;
  if (!session->TakeTrace(&records)) {
    ++refused_;
    session->SetTracing(false);
  }
  const int64_t now_ns = TraceNowNs();
  for (const TraceRecord& record : records) {
    if (!IsPossible(record, rank, now_ns)) {
      ++refused_;
      continue;
    }
    rank.last_end_ns = record.end_ns;
    rank.closed_step = std::max(rank.closed_step, record.call == v1::TRACE_CALL_STEP ? record.step : record.step - 1);
    for (const auto& trace : traces_) {
      int64_t& seen_in = trace->seen_in[static_cast<size_t>(number)];
      if (seen_in < 0 && record.begin_ns >= trace->begin_ns) {
        seen_in = record.step;
      }
      trace->lost += record.lost;
    }
    v1::TraceSpan span;
    span.set_kind(v1::TRACE_KIND_CALL);
    span.set_rank(number);
    span.set_group(record.group);
    span.set_step(record.step);
    span.set_begin_ns(record.begin_ns);
    span.set_end_ns(record.end_ns);
    span.set_call(static_cast<v1::TraceCall>(record.call));
    span.set_lost(record.lost);
    span.set_epoch(session->epoch());
    Add(span);
  }
}

void JobTrace::TakeWork() {
  if (work_ == nullptr) {
    return;
  }
  auto [works, lost] = work_->Take();
  for (const auto& trace : traces_) {
    trace->lost += lost;
  }
  for (TracedWork& work : works) {
    v1::TraceSpan span;
    span.set_kind(v1::TRACE_KIND_WORK);
    span.set_rank(work.rank);
    span.set_group(-1);
    span.set_begin_ns(work.begin_ns);
    span.set_end_ns(work.end_ns);
    span.set_device(std::move(work.device));
    span.set_stream(std::string(StreamName(work.stream)));
    span.set_label(std::move(work.label));
    Add(span);
  }
}

void JobTrace::Poll(const std::vector<std::unique_ptr<Session>>& sessions, const Describe& describe) {
  for (const auto& session : sessions) {
    if (session != nullptr) {
      TakeCalls(session.get());
    }
  }
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
  end.set_refused_records(refused_);
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
    End(*trace, v1::TRACE_END_REASON_JOB_ENDED, why, nullptr);
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
      session->SetTracing(false);
    }
  }
  for (Rank& rank : ranks_) {
    std::fill(rank.submitted_ns.begin(), rank.submitted_ns.end(), 0);
  }
  refused_ = 0;
  if (work_ != nullptr) {
    work_->SetOn(false);
    (void)work_->Take();
  }
}

void JobTrace::SessionBegins(Session* session) {
  if (!on()) {
    return;
  }
  session->SetTracing(true);
  ranks_[static_cast<size_t>(session->rank())].closed_step = 0;  // the job may have gone back
  for (const auto& trace : traces_) {
    trace->seen_in[static_cast<size_t>(session->rank())] = -1;
  }
}

void JobTrace::SessionEnds(Session* session) {
  if (on()) {
    TakeCalls(session);
    Rank& rank = ranks_[static_cast<size_t>(session->rank())];
    std::fill(rank.submitted_ns.begin(), rank.submitted_ns.end(), 0);
  }
}

void JobTrace::Submitted(int rank, int group) {
  const int slot = plan_->groups[static_cast<size_t>(group)].gradient_slot;
  if (on() && slot >= 0) {
    ranks_[static_cast<size_t>(rank)].submitted_ns[static_cast<size_t>(slot)] = TraceNowNs();
  }
}

void JobTrace::Reduced(int rank, int group, int64_t step) {
  const int slot = plan_->groups[static_cast<size_t>(group)].gradient_slot;
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

void JobTrace::Committed(int64_t step, const std::vector<std::unique_ptr<Session>>& sessions) {
  if (!on()) {
    last_commit_ns_ = 0;
    return;
  }
  for (const auto& session : sessions) {
    if (session != nullptr) {
      TakeCalls(session.get());
    }
  }
  const int64_t now_ns = TraceNowNs();
  for (const auto& trace : traces_) {
    v1::TraceSpan* span = trace->pending.add_spans();
    span->set_kind(v1::TRACE_KIND_STEP);
    span->set_rank(-1);
    span->set_group(-1);
    span->set_step(step);
    span->set_begin_ns(std::max(trace->begin_ns, last_commit_ns_));
    span->set_end_ns(now_ns);
    trace->committed_step = step;
    const int64_t first = FirstWholeStep(*trace);
    if (first > 0 && trace->last_step == 0 && step >= first + trace->steps - 1) {
      trace->last_step = step;
      trace->last_calls = MonotonicNow() + kLastCalls;
    }
  }
  last_commit_ns_ = now_ns;
}

// JobCore's part -----------------------------------------------------------------------------------------------------

void JobCore::Trace(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) {
  v1::TraceStart start;
  start.set_job(name());
  start.set_world_size(world_size());
  start.set_version(kVersion);
  for (const GroupPlan& group : plan_->groups) {
    v1::TraceStart::Group* out = start.add_groups();
    out->set_name(group.name);
    out->set_unsharded_bytes(group.unsharded_bytes);
    out->set_gradient_bytes(group.gradient_bytes);
    out->set_gradient_slot(group.gradient_slot);
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    start.add_devices(devices_[rank]->name());
    start.add_pids(sessions_[rank] == nullptr ? 0 : sessions_[rank]->peer.pid);
  }
  DescribeMemory(start.mutable_memory());
  const bool polled = trace_.on();
  trace_.Begin(request, std::move(start), committed_step_, std::move(sink), sessions_);
  if (!polled) {
    PollTraceLater();
  }
}

void JobCore::PollTraceLater() {
  loop_->AddTimer(MonotonicNow() + JobTrace::kInterval, [weak = weak_from_this()] {
    const std::shared_ptr<JobCore> self = weak.lock();
    if (self == nullptr || !self->trace_.on()) {
      return;
    }
    self->trace_.Poll(self->sessions_, [&self](v1::TraceEnd* end) {
      self->DescribeMemory(end->mutable_memory());
      for (int rank = 0; rank < self->world_size() && end->reason() == v1::TRACE_END_REASON_TIMEOUT; ++rank) {
        if (const std::string waits = self->WaitText(rank); !waits.empty()) {
          end->set_text(absl::StrCat(end->text(), "; rank ", rank, " waits for ", waits));
        }
      }
    });
    if (self->trace_.on()) {
      self->PollTraceLater();
    }
  });
}

}  // namespace shardd
