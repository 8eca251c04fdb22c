// What ranks and devices have measured, taken into the traces of the job.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/device/traced_device.h"
#include "server/job/trace/job_trace.h"
#include "server/session/session.h"

namespace shardd {
namespace {

// All jobs share the loop: so long it is held for calls at a time, which is looked at after so many records.
constexpr int64_t kSliceNs = 1'000'000;
constexpr size_t kRecordsAtATime = 256;
// A rank may have sent a step that is not committed, and be in the next.
constexpr int64_t kStepsAhead = 2;

}  // namespace

// The trainer wrote it: it may say anything.
bool JobTrace::IsPossible(const TraceRecord& record, const Rank& rank, int64_t now_ns) const {
  const int call = record.call & ~kTraceCallFailed;
  return record.begin_ns >= rank.last_end_ns && record.end_ns >= record.begin_ns && record.end_ns <= now_ns &&
         record.group >= -1 && record.group < static_cast<int64_t>(see_.plan->groups.size()) && record.step >= 0 &&
         record.step <= committed_step_ + kStepsAhead && call != v1::TRACE_CALL_UNSPECIFIED &&
         v1::TraceCall_IsValid(call);
}

void JobTrace::TakeCallsOfAll(const std::vector<std::unique_ptr<Session>>& sessions) {
  const int64_t until_ns = TraceNowNs() + kSliceNs;
  for (size_t empty = 0; empty < sessions.size() && TraceNowNs() < until_ns;) {  // in a row
    Session* session = sessions[next_rank_].get();
    next_rank_ = (next_rank_ + 1) % sessions.size();  // whoever writes fast delays itself only
    empty = session != nullptr && TakeCalls(session) ? 0 : empty + 1;
  }
}

bool JobTrace::TakeCalls(Session* session) {
  const int number = session->rank();
  Rank& rank = ranks_[static_cast<size_t>(number)];
  std::vector<TraceRecord> records;
  const auto refuse = [this] {
    for (const auto& trace : traces_) {
      ++trace->refused;
    }
  };
  if (!session->trace().Take(kRecordsAtATime, &records)) {
    refuse();
    session->trace().SetTracing(false);
  }
  const int64_t now_ns = TraceNowNs();
  for (const TraceRecord& record : records) {
    if (!IsPossible(record, rank, now_ns)) {
      refuse();
      continue;
    }
    rank.last_end_ns = record.end_ns;
    rank.closed_step = std::max(rank.closed_step, record.step - 1);
    for (const auto& trace : traces_) {
      int64_t& seen_in = trace->seen_in[static_cast<size_t>(number)];
      if (record.begin_ns < trace->begin_ns) {
        continue;
      }
      if (seen_in < 0) {
        seen_in = record.step;  // what is missing before it is of an earlier trace, or of no whole step
      } else {
        trace->lost += record.lost;
      }
    }
    v1::TraceSpan span;
    span.set_kind(v1::TRACE_KIND_CALL);
    span.set_rank(number);
    span.set_group(record.group);
    span.set_step(record.step);
    span.set_begin_ns(record.begin_ns);
    span.set_end_ns(record.end_ns);
    span.set_call(static_cast<v1::TraceCall>(record.call & ~kTraceCallFailed));
    span.set_failed((record.call & kTraceCallFailed) != 0);
    span.set_lost(record.lost);
    span.set_epoch(session->epoch());
    Add(span);
  }
  return records.size() == kRecordsAtATime;
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

void JobTrace::SessionBegins(Session* session) {
  if (!on()) {
    return;
  }
  session->trace().SetTracing(true);
  ranks_[static_cast<size_t>(session->rank())].closed_step = 0;  // the job may have gone back
  for (const auto& trace : traces_) {
    if (trace->last_step == 0) {  // else its whole steps are known, and over
      trace->seen_in[static_cast<size_t>(session->rank())] = -1;
    }
  }
}

void JobTrace::SessionEnds(Session* session) {
  if (on()) {
    const int64_t until_ns = TraceNowNs() + kSliceNs;
    while (TakeCalls(session) && TraceNowNs() < until_ns) {
    }
    const auto left = static_cast<int64_t>(session->trace().Drop());
    for (const auto& trace : traces_) {
      trace->lost += left;
    }
    session->trace().SetTracing(false);
    Rank& rank = ranks_[static_cast<size_t>(session->rank())];
    std::fill(rank.submitted_ns.begin(), rank.submitted_ns.end(), 0);
  }
}

}  // namespace shardd
