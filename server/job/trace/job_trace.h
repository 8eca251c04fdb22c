#ifndef SHARDD_SERVER_JOB_TRACE_JOB_TRACE_H_
#define SHARDD_SERVER_JOB_TRACE_JOB_TRACE_H_

// The traces of one job, for as many operators as ask. Times come from where things happen: a rank's calls from its
// trainer (common/shm/trace_ring.h), work on streams from the devices (server/device/traced_device.h), reductions and
// commits from the job itself. Nothing is measured while nobody traces.
//
// Whole steps are counted: a rank that is seen in step s when tracing begins has missed the start of s, so the first
// whole step is the one after the latest s of all ranks.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "common/shm/trace_ring.h"
#include "server/job/job_part.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class Committed;
class Device;
class JobWork;
class MemoryAccount;
class Session;
class Sessions;
class TraceSink;
class WorkTrace;

// Loop-confined. The owner calls the hooks; each is free while nobody traces.
class JobTrace final : public JobPart {
 public:
  struct Facts {
    std::string job;  // its name
    std::shared_ptr<const ShardPlan> plan;
    const std::vector<Device*>* devices = nullptr;
    const Sessions* sessions = nullptr;
    const ::shardd::Committed* committed = nullptr;
    const MemoryAccount* memory = nullptr;
    std::function<std::string(int rank)> wait_text;  // for whom and for what the rank waits
  };
  // All outlive it. `keep` keeps the job alive while its timer runs. `measured`: what devices do; null: not known.
  JobTrace(Facts facts, std::shared_ptr<WorkTrace> measured, const JobWork* keep)
      : see_(std::move(facts)), work_(std::move(measured)), keep_(keep), ranks_(see_.plan->world_size) {}

  bool on() const { return !traces_.empty(); }

  // The request is within the limits of the rpc, whoever asks may see the job; the sink was prepared with
  // DescribeTraced.
  void Begin(const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink);
  // The job is closed, its sessions have ended.
  void EndAll(const std::string& why);

  // Hooks.
  void SessionBegins(Session* session);
  void SessionEnds(Session* session) override;
  void Submitted(int rank, int group);
  void Released(int rank, int slot);
  void Reduced(int rank, int group, int64_t step);
  // Before Committed: the rank of the step that the others waited for longest, and for how long, all of them together.
  void Awaited(int64_t step, int rank, absl::Duration together);
  void Committed(int64_t step, const std::vector<std::unique_ptr<Session>>& sessions);

 private:
  struct Trace {
    std::shared_ptr<TraceSink> sink;
    int steps = 0;
    int64_t timeout_ms = 0;
    absl::Time deadline;
    int64_t begin_ns = 0;
    int64_t committed_step = 0;
    std::vector<int64_t> seen_in;  // by rank: the step in which it was first seen; -1: not yet
    int64_t last_step = 0;         // when all are there: the step to end with; 0: not yet
    absl::Time last_calls;         // ... and until when the calls that end it are waited for
    int64_t lost = 0;
    int64_t refused = 0;
    v1::TraceSpans pending;
  };
  struct Rank {
    int64_t last_end_ns = 0;            // of its calls
    int64_t closed_step = 0;            // a call of the step after it was seen: there is no more of it
    std::vector<int64_t> submitted_ns;  // by slot: when it was filled; 0: free
  };

  using Describe = std::function<void(v1::TraceEnd*)>;

  v1::TraceStart Start() const;
  void Complete(v1::TraceEnd* end) const;
  // While on(): takes what ranks and devices have measured, as much as other jobs can wait for, and ends what has come
  // to its end.
  void Poll();
  void PollLater();
  bool TakeCalls(Session* session);  // some of them; false: there are no more
  void TakeCallsOfAll(const std::vector<std::unique_ptr<Session>>& sessions);
  void TakeWork();
  bool IsPossible(const TraceRecord& record, const Rank& rank, int64_t now_ns) const;
  void Add(const v1::TraceSpan& span);
  void Flush(Trace& trace);
  int64_t FirstWholeStep(const Trace& trace) const;  // 0: not known yet
  void End(Trace& trace, v1::TraceEndReason reason, const std::string& text, const Describe& describe);
  void Review(const std::vector<std::unique_ptr<Session>>& sessions);  // whether nobody traces any more

  const Facts see_;
  const std::shared_ptr<WorkTrace> work_;  // null: devices are not traced
  const JobWork* const keep_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Trace>> traces_;
  int64_t last_commit_ns_ = 0;
  int64_t committed_step_ = 0;
  std::pair<int64_t, std::string> awaited_;  // of a step, in words
  size_t next_rank_ = 0;                     // whose calls are taken next
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_TRACE_JOB_TRACE_H_
