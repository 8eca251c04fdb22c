#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_UNFINISHED_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_UNFINISHED_H_

// What a daemon was doing with a job's memory when it ended, and the next one completes or takes back. All block, and
// change nothing but that memory. DATA_LOSS: what they are given is of another plan, or a device is lost.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/device/device_op.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/job_memory.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

class Device;
struct SlabPointers;
class TakeUpLog;

// Each rank's operations by its device.
absl::Status RunOnDevices(const std::vector<Device*>& devices, const char* label,
                          std::vector<std::vector<DeviceOp>> by_rank);

// Completes the update that the record describes, whatever of it was done. `written`: trainers had handed in beside it.
absl::Status CompleteStep(const ShardPlan& plan, const v1::DecidedStepRecord& record, const SlabPointers& slabs,
                          const TakeUpLog& log, bool written);
// The same by the GPUs that the job is on.
absl::Status CompleteStepOnGpus(const ShardPlan& plan, const v1::DecidedStepRecord& record, const JobMemory& memory,
                                const TakeUpLog& log, const std::vector<Device*>& devices);

// Copies what trainers write into the snapshot; where its shards are `in_copies`, the state into that, and shards into
// what passes read. `behind_pass`: those have what passes read of them already, and trainers may store into shards.
// REQUIRES: nobody stores into what is copied; SnapshotMayBeInCopies, for `in_copies`.
absl::Status CompleteSnapshot(const ShardPlan& plan, const SlabPointers& slabs, char* snapshot, bool in_copies,
                              bool behind_pass);

// Makes the copies that passes read, on the host, of the shards with which `snapshot` begins.
absl::Status MakeCopies(const ShardPlan& plan, SlabPointers slabs, char* snapshot);
// The same by the GPUs that the job is on, of the first or the `second` of two snapshots.
absl::Status MakeCopiesOnGpus(const ShardPlan& plan, const JobMemory& memory, bool second,
                              const std::vector<Device*>& devices);

// Drops memory of the host that was handed over. Its pages go at once, so that those of what is made in its place take
// no more.
void DropHost(const char* name, JobMemory::Kept* kept);

// Ranks were loading values, and the daemon ended before these were a version, or when they were. `version`: the
// committed one; nothing: what counts is made anew.
absl::Status TakeBackLoadedValues(const ShardPlan& plan, const JobMemory& memory, std::optional<uint64_t> version,
                                  const std::vector<Device*>& devices);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_UNFINISHED_H_
