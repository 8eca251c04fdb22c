#ifndef SHARDD_COMMON_SHM_SUM_RING_H_
#define SHARDD_COMMON_SHM_SUM_RING_H_

// What a rank's library is told to add (JobConfig.trainer_sums): single producer (the daemon's loop), single consumer
// (a thread of the library). The ring lies behind the daemon's page, the words that answer it in a page of the session
// memory. Records name memory of the session and its peers by purpose and offset, never by address, and whatever they
// say, the client checks it against the plan before it touches anything.
//
// Record n lies at index n % kSumRecords. The daemon fills it, then stores SumRing::written = n + 1. The client takes
// all that are there, enqueues what they say into one stream, in their order, and behind it a write of
// SumWords::summed = n + 1: so at most kSumRecords are under way. A record whose `sequence` is not n is an error of the
// daemon's.
//
// Both objects are made anew with each session. A kernel that a session has enqueued may outlive it: the rank's next
// session is given when `summed` has come to all that was written, the client has said `ended`, or its process is gone.

#include <atomic>
#include <cstdint>

#include "common/shm/timeline.h"

namespace shardd {

inline constexpr uint32_t kSumRecords = 256;
inline constexpr int kMaxSumRanks = 128;  // of a job; as many as a kernel takes sources

enum class SumKind : uint32_t {
  kInvalid = 0,
  kSum = 1,   // the gradients of `ranks`, in ascending order
  kCopy = 2,  // from the gradient shards to the gradient shards
  kZero = 3,  // of the gradient shards
};

// Memory that is written is in slab "gradients"; `source_offset_bytes` is of each rank's gradient slots (kSum) or of
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

// The daemon writes.
struct SumRing {
  alignas(128) TimelineWord written;  // epoch << 40 | records written so far
  // By rank: the session whose gradient slots are meant; before the first record that names the rank.
  alignas(128) std::atomic<uint64_t> sessions[kMaxSumRanks];
  SumRecord records[kSumRecords];
};

// The client writes, a page of its own: its GPU writes there too. The daemon reads each word once and checks its range.
struct SumWords {
  alignas(128) TimelineWord summed;  // epoch << 40 | records whose sums are there
  // Non-zero while the library's thread sleeps, or is about to, on `written`.
  alignas(128) std::atomic<uint32_t> waiting;
  // Not 0: nothing that this session was told is under way any more, nor will be. 2: and it cannot go on; `error` says
  // why.
  alignas(128) std::atomic<uint32_t> ended;
  char error[512];  // text, before `ended`
};
static_assert(sizeof(SumWords) <= 4096);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SUM_RING_H_
