#ifndef SHARDD_COMMON_SHM_RING_H_
#define SHARDD_COMMON_SHM_RING_H_

// Commands of the hot path as 64-byte records; single producer (the client), single consumer (the daemon's loop). A
// gRPC write costs the trainer 31 to 37 us, a record about 0.1 us. The client rings a doorbell (eventfd) only for
// records on which the daemon must act, and only while it sleeps. Every record names its group, so nothing depends on
// position.
//
// Record n is at index n % kRingRecords. The client fills it and then stores ClientPage::submitted = n + 1. The daemon
// copies it once, checks it, and stores DaemonPage::consumed = n + 1; only then may the client reuse the record's
// place, the group's masks and the step payload. A record whose `sequence` is not n is a protocol error.

#include <cstdint>

namespace shardd {

inline constexpr uint32_t kRingRecords = 1024;

enum class Opcode : uint32_t {
  kInvalid = 0,
  kUnshard = 1,          // group, arg0 = v1::Phase
  kReshard = 2,          // group
  kSubmitGradients = 3,  // group; flags: kHasPresent, kHasFresh (masks area), kAsksForOthers
  kBackwardDone = 4,     // arg0 = index, flags: kLast
  kStep = 5,             // arg0 = bytes of the serialized v1::Step in the payload area
  // flags: kOfGradient, or from bit kWrittenStateShift on WriteParameters.optimizer_state in 16 bits; group = parameter
  // index, arg0 = first element, arg1 = numel, arg2 = staging offset bytes
  kWriteParameters = 6,
  kCommitParameters = 7,
  kEnterFullParams = 8,  // group, or -1: all; flags: kWriteback, kRank0Only, kWithGrads, kNotRecurse, kEdits
  kLeaveFullParams = 9,
  kEnterPass = 10,  // flags: kStepped, kAsksToStore, kEdits; then arg0 = bytes of the trainer state in the payload area
  kLeavePass = 12,
  kHandIn = 13,
  // group: this rank cannot continue until the group's gradient slot is released. Sent once, with a doorbell, before
  // the client sleeps on a word of the slot. When all ranks are stuck like this, the daemon adds what it has out of
  // turn.
  kWaitGradientSlot = 11,
  kAbandonBackward = 14,
  kSetGradientPresence = 15,  // group = parameter index, arg0 = 1: the gradient shard has a gradient; 0: it has none
};

inline constexpr uint32_t kHasPresent = 1;
inline constexpr uint32_t kHasFresh = 2;
inline constexpr uint32_t kLast = 4;
inline constexpr uint32_t kWriteback = 8;
inline constexpr uint32_t kStepped = 16;
inline constexpr uint32_t kRank0Only = 32;
inline constexpr uint32_t kWithGrads = 64;
inline constexpr uint32_t kNotRecurse = 128;
inline constexpr uint32_t kOfGradient = 256;
// EnterPass: before the rank stores into state of its optimizer it waits until no snapshot is under way
// (DaemonPage::snapshots_whole). A daemon that does not know it has taken the snapshot when it lets the rank in.
inline constexpr uint32_t kAsksToStore = 512;
// SubmitGradients: the rank asks which gradients others gave. What replaces is added to a gradient that others gave in
// a backward that the rank has not asked about. To a daemon that does not know it, it replaces.
inline constexpr uint32_t kAsksForOthers = 1024;
// Where edits are written back (ShardPlan.writes_edits_back). EnterPass: the rank has some. EnterFullParams: what it
// is about to write are those, of which each rank has its own.
inline constexpr uint32_t kEdits = 2048;
inline constexpr int kWrittenStateShift = 16;
// Limit on the updates of one parameter by the daemon's optimizer that a trainer may write.
inline constexpr int64_t kMaxUpdates = int64_t{1} << 53;

struct alignas(64) CommandRecord {
  uint64_t sequence;
  Opcode opcode;
  uint32_t flags;
  int32_t group;
  uint32_t reserved0;
  int64_t arg0;
  int64_t arg1;
  int64_t arg2;
  // The memory that the record releases is free when ClientPage::done reaches this count; the write of `done` was
  // enqueued before the record was published. 0: the program's host has waited for its device, or the record releases
  // nothing.
  uint64_t done;
};
static_assert(sizeof(CommandRecord) == 64);

inline constexpr int64_t kRingBytes = int64_t{kRingRecords} * sizeof(CommandRecord);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_RING_H_
