// What a job's traces begin and end with, and when they are looked at; job_trace.cc has the rest.

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "server/job/job_core.h"

namespace shardd {

void DescribeTraced(const ShardPlan& plan, v1::TraceStart* out) {
  for (const GroupPlan& group : plan.groups) {
    v1::TraceStart::Group* to = out->add_groups();
    to->set_name(group.name);
    to->set_unsharded_bytes(group.unsharded_bytes);
    to->set_gradient_bytes(group.gradient_bytes);
    to->set_gradient_slot(group.gradient_slot);
  }
}

void JobCore::Trace(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) {
  v1::TraceStart start;
  start.set_job(name());
  start.set_world_size(world_size());
  start.set_version(kVersion);
  for (int rank = 0; rank < world_size(); ++rank) {
    start.add_devices(devices_[rank]->name());
    start.add_pids(sessions_[rank] == nullptr ? 0 : sessions_[rank]->peer.pid);
  }
  memory_account_.Describe(start.mutable_memory());
  const bool polled = trace_.on();
  trace_.Begin(request, std::move(start), committed_.step(), std::move(sink), sessions_.by_rank());
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
    self->trace_.Poll(self->sessions_.by_rank(), [&self](v1::TraceEnd* end) {
      self->memory_account_.Describe(end->mutable_memory());
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
