#ifndef SHARDD_COMMON_SHM_PAGE_H_
#define SHARDD_COMMON_SHM_PAGE_H_

// The words that client and daemon share: plain structs of atomics at fixed offsets, zero at the start and never moved.
// A word may be added without another protocol version in the rest of a line, if zero means what was before; whatever
// moves a word, or the end of either page, is of another version (common/versions/versions.h). Each word has one
// writer. Words are 128 bytes apart (adjacent-line prefetch). Both objects are new with each
// session, and a session belongs to one epoch, so no writer of an old epoch can touch a word of a new one.

#include <atomic>
#include <cstdint>

#include "common/shm/timeline.h"

namespace shardd {

// Start of the session memory. The client writes it; the daemon reads each word once and checks its range.
struct ClientPage {
  static constexpr uint64_t kMagic = 0x7368617264634c31;  // "shardcL1"
  uint64_t magic;
  uint64_t reserved[15];
  // Number of ring records written: epoch << 40 | count.
  alignas(128) TimelineWord submitted;
  // On a GPU whose program has named its stream: epoch << 40 | number of signals that the GPU has reached. One stream
  // of the client writes it, after the program's stream; CommandRecord::done names the signal that frees a record's
  // memory. A late write of a dead program lands in this page, which nobody reads any more, or nowhere.
  alignas(128) TimelineWord done;
  // Not 0: the client gave up a wait of its GPU. What its streams compute and signal from then on is meaningless, and
  // no signal counts. The client sets it before it moves the words that the GPU waits for.
  alignas(128) std::atomic<uint32_t> is_void;
  // Not 0 while the client sleeps, or is about to, on a word of the daemon's page (see TimelineWait).
  alignas(128) std::atomic<uint32_t> waiting;
  alignas(128) std::atomic<uint32_t> reserved_word;  // nobody reads it
  // Number of records written into the trace ring (trace_ring.h).
  alignas(128) std::atomic<uint64_t> trace_written;
};
static_assert(sizeof(ClientPage) <= 4096);

// Start of the daemon's page. The client maps it read-only, unless the client's GPU waits for its words: only its word
// ends a stream's wait, so that client maps the page writable and moves its own words to the next epoch when the daemon
// is dead or a wait has taken too long. That is safe: the daemon never reads its own page back, and the page belongs to
// this session alone, so nonsense in it harms only its writer.
struct DaemonPage {
  static constexpr uint64_t kMagic = 0x7368617264644c31;
  uint64_t magic;
  // Of the session, and so of the layout of its two objects. 0: 13, whose daemons do not say it.
  uint64_t protocol_version;
  uint64_t reserved[14];
  alignas(128) TimelineWord epoch;  // epoch << 40; an epoch later than the session's: the session is over
  // In the line of the epoch, which every call reads. Not 0: the client writes the trace ring; the daemon has read
  // `trace_taken` of its records.
  std::atomic<uint32_t> tracing;
  std::atomic<uint64_t> trace_taken;
  alignas(128) TimelineWord version;      // epoch << 40 | version of the parameters that can be read
  alignas(128) TimelineWord consumed;     // epoch << 40 | ring records consumed
  alignas(128) TimelineWord full_params;  // epoch << 40 | number of EnterFullParams granted to this rank
  // epoch << 40 | number of backwards that this rank has closed in this session, to which no rank can add any more, and
  // whose gradients are all in the gradient shards.
  alignas(128) TimelineWord reduced;
  // The same number as soon as no rank can delay it any more: devices have all additions. A stream may then wait for
  // `reduced`.
  alignas(128) TimelineWord reducing;
  // In the same line. epoch << 40 | number, as `reducing` counts, of the last backward in which some rank gave a
  // gradient of a parameter that this rank did not give. Written before `reducing`. A daemon that moves it serves
  // TrainerService.OthersGradients. 0: there was no such backward, or the daemon is older and says nothing of it.
  TimelineWord others_gave;
  alignas(128) TimelineWord passes;  // epoch << 40 | number of EnterPass granted to this rank in this session
  // In the same line. Of ranks that ask before they store (kAsksToStore): epoch << 40 | number of snapshots that were
  // begun behind the copies of a pass, written before `passes`; and of those that are whole. While they differ devices
  // read the state that trainers keep, and no rank stores into it. 0: none was begun.
  TimelineWord snapshots_begun;
  TimelineWord snapshots_whole;
  // JobConfig.pass_copies: number of EnterPass that are granted as soon as devices have made the copies, which no rank
  // can delay any more. A stream may then wait for `passes`.
  alignas(128) TimelineWord passes_issued;
  alignas(128) TimelineWord hand_ins;  // epoch << 40 | number of HandIn granted
  // Not 0 while the daemon's loop is awake and will read the ring before it sleeps: no doorbell is needed.
  alignas(128) std::atomic<uint32_t> awake;
  alignas(128) TimelineWord tail[1];  // slot words, then group entries (DaemonPageView)
};

// Per gradient slot: epoch << 40 | number of this rank's submissions in the slot that the daemon has finished reading
// (`released`); and of those that no rank can delay any more, so that a stream may wait for `released`.
struct alignas(128) SlotEntry {
  TimelineWord released;
  TimelineWord issued;
};

// Per group: epoch << 40 | number of the rank's Unshard commands for the group that are done (prefetches count ahead of
// them).
struct alignas(128) GroupEntry {
  TimelineWord unsharded;
  // POOLED: offset of the group in bytes from the start of the unsharded pool. Written before `issued`.
  std::atomic<int64_t> pool_offset_bytes;
  // POOLED: number of commands whose offset is known and which no rank can delay any more: a stream may then wait for
  // `unsharded`.
  TimelineWord issued;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_PAGE_H_
