#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_TAKEN_UP_JOB_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_TAKEN_UP_JOB_H_

// How a job is written down with the custodian, and what the next daemon reads there.
//
// A step that a job over several nodes has promised stays so, with the gradients that it was reduced to: node 0 says
// what becomes of it.
//
// On GPUs its streams complete a step, by the kernels that make every other, from what is left of it
// (server/device/ops/rest_of_update.h). Gradients stay, and shards where the snapshot counts, because others would have
// to find room beside those that trainers map: whoever may write them has ended, or asks to attach again, before they
// are used. Where nobody knows who they are, shards are made anew, and gradients before the first session.
//
// What it goes on with is what the take-up log says that counts (TakeUpLog::Counts): the shards, behind a decided step
// that is completed, or the snapshot. Trainers of before may go on storing into shards and gradients that they map: the
// shards are made anew where the snapshot counts, and the gradients where it is not known who these trainers are.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "server/daemon/take_up/custody_record.h"
#include "server/device/slab_place.h"
#include "server/job/membership/past_process.h"
#include "server/job/step/committed.h"
#include "server/multinode/node_member.h"
#include "server/storage/job_memory.h"
#include "server/storage/journal.h"
#include "server/storage/take_up_log.h"
#include "shardd/v1/custody.pb.h"

namespace shardd {

class Device;

// Whether jobs of the plan outlive their daemon: where there is a snapshot of all that trainers may store into.
bool OutlivesDaemon(const ShardPlan& plan);

// What the daemon before this one has left of a job.
struct TakenUpJob {
  v1::CustodyJob job;
  ShardPlan plan;
  std::unique_ptr<JobMemory> memory;
  std::unique_ptr<Journal> journal;
  std::unique_ptr<TakeUpLog> log;
  CommittedFacts committed;         // of a new epoch
  NodeLeft node;                    // over several nodes
  std::vector<PastProcess> former;  // empty where nobody knows who they are
  std::vector<PastProcess> living;  // who had sessions, and attaches again

  v1::KeptFormats formats() const;
};

// The devices of a daemon.
struct TakeUpOn {
  std::vector<Device*> devices;                    // rank r's is the (r modulo their number)th
  std::function<SlabPlace(int world_size)> place;  // of a job's slabs
};

// A job that a daemon has left, as it is read before anything of it is changed. Thread-compatible.
class LeftJob {
 public:
  // Takes no time that grows with the model's parameters, and opens no files. NOT_FOUND: nothing was committed, or the
  // job was not there for anybody. DATA_LOSS: it is nothing that this daemon could go on with, and says why.
  // FAILED_PRECONDITION: it is of a format that another version of shardd reads. RESOURCE_EXHAUSTED: see TakeUp.
  static absl::StatusOr<LeftJob> Read(JobMemory::Kept kept, const TakeUpOn& on);
  LeftJob(LeftJob&&) noexcept;
  LeftJob& operator=(LeftJob&&) noexcept;
  ~LeftJob();

  const TakenUpJob& job() const;               // all but its memory
  const TakeUpLog::Header& committed() const;  // what will be, behind TakeUp
  int64_t planned_bytes() const;               // of the host, what is there already included

  // Completes a step that was decided, and a snapshot that was being taken. Blocks. Once. Errors as Read.
  // RESOURCE_EXHAUSTED: this process lacks memory or descriptors for it; what is kept may be read again later.
  // REQUIRES: on GPUs, the former daemon has ended, and with it whatever its streams were doing.
  absl::StatusOr<TakenUpJob> TakeUp(const TakeUpOn& on);

 private:
  struct State;
  explicit LeftJob(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Both.
absl::StatusOr<TakenUpJob> ReadTakenUpJob(JobMemory::Kept kept, const TakeUpOn& on);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_TAKEN_UP_JOB_H_
