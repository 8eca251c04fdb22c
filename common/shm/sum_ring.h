#ifndef SHARDD_COMMON_SHM_SUM_RING_H_
#define SHARDD_COMMON_SHM_SUM_RING_H_

// Orders of the daemon to a rank's library to reduce gradients (JobConfig.trainer_sums); single producer (the daemon's
// loop), single consumer (a thread of the library). The ring follows the daemon's page; the words that answer it are in
// a page of the session memory. Records name memory of the session and its peer ranks by purpose and offset, never by
// address, and the client checks every record against the plan before it touches anything.
//
// Record n is at index n % kSumRecords. The daemon fills it and then stores SumRing::written = n + 1. The client takes
// all available records, enqueues their work in order into one stream, and after it a write of SumWords::summed = n +
// 1. So at most kSumRecords are under way. A record whose `sequence` is not n is an error of the daemon.
//
// Both objects are new with each session. A kernel that a session has enqueued may outlive it: the rank's next session
// waits until `summed` has reached all records, the client has set `ended`, or its process is gone.

#include <atomic>
#include <cstdint>

#include "common/shm/timeline.h"

namespace shardd {

inline constexpr uint32_t kSumRecords = 256;
inline constexpr int kMaxSumRanks = 128;  // limit of a job's ranks: the number of sources that a kernel takes

enum class SumKind : uint32_t {
  kInvalid = 0,
  kSum = 1,   // the gradients of `ranks`, in ascending order
  kCopy = 2,  // copies within the gradient shards
  kZero = 3,  // zeroes gradient shards
};

// The destination is in slab "gradients". `source_offset_bytes` is relative to each rank's gradient slots (kSum) or to
// slab "gradients" (kCopy). Dtypes are numbers of v1::DType, as in ReduceOp.
struct alignas(128) SumRecord {
  uint64_t sequence;
  SumKind kind;
  int32_t group;
  uint64_t ranks[2];  // bit r % 64 of word r / 64
  int64_t source_offset_bytes;
  int64_t dst_offset_bytes;
  int64_t numel;  // elements of the source, written as fp32; kCopy, kZero: bytes
  int32_t source_dtype;
  int32_t reduce_dtype;
  int32_t keep;
  float scale;
  uint32_t accumulate;  // 0 or 1
};
static_assert(sizeof(SumRecord) == 128);

// Written by the daemon.
struct SumRing {
  alignas(128) TimelineWord written;  // epoch << 40 | number of records written
  // By rank: the session whose gradient slots are meant; written before the first record that names the rank.
  alignas(128) std::atomic<uint64_t> sessions[kMaxSumRanks];
  SumRecord records[kSumRecords];
};

// Written by the client and its GPU, in a page of its own. The daemon reads each word once and checks its range.
struct SumWords {
  alignas(128) TimelineWord summed;  // epoch << 40 | number of records whose sums are done
  // Not 0 while the library's thread sleeps, or is about to, on `written`.
  alignas(128) std::atomic<uint32_t> waiting;
  // Not 0: no work of this session's records is under way, and there will be none. 2: the session also cannot continue;
  // `error` says why.
  alignas(128) std::atomic<uint32_t> ended;
  char error[512];  // text; written before `ended`
};
static_assert(sizeof(SumWords) <= 4096);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SUM_RING_H_
