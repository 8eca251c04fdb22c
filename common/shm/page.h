#ifndef SHARDD_COMMON_SHM_PAGE_H_
#define SHARDD_COMMON_SHM_PAGE_H_

// The words that client and daemon share. Plain structs of atomics at fixed offsets, never moved, zero at the start.
// Each word has one writer, but for ClientPage::pass. Words stand 128 bytes apart (adjacent-line prefetch). Both
// objects are made anew with each session, and a session belongs to one epoch, so no writer of an old epoch can touch a
// word of a new one.

#include <atomic>
#include <cstdint>

#include "common/shm/timeline.h"

namespace shardd {

// Whether the client of a job whose trainers write is reading in its pass.
enum class PassWord : uint32_t {
  kReading = 0,    // or is not inside a pass
  kPaused = 1,     // between a forward and what may be its backward: it reads nothing
  kOvertaken = 2,  // a write window was opened meanwhile: the pass is over for it
};

// Start of the session memory; the client writes, the daemon reads each word once and checks its range.
struct ClientPage {
  static constexpr uint64_t kMagic = 0x7368617264634c31;  // "shardcL1"
  uint64_t magic;
  uint64_t reserved[15];
  // Ring records written so far: epoch << 40 | count.
  alignas(128) TimelineWord submitted;
  // On a GPU whose program has named its stream: epoch << 40 | signals that the GPU has come to. Written by one stream
  // of the client's, behind the program's; CommandRecord::done says which signal a record's memory is free with. A
  // write of a program that has died lands here, in a page that nobody looks at any more, or nowhere.
  alignas(128) TimelineWord done;
  // Not 0: a wait of the client's GPU was given up. What its streams compute and signal from then on means nothing, and
  // no signal counts any more. Written before the words that it waits for are moved.
  alignas(128) std::atomic<uint32_t> is_void;
  // Non-zero while the client sleeps, or is about to, on a word of the daemon's page (see Timeline::Wait).
  alignas(128) std::atomic<uint32_t> waiting;
  // A PassWord, moved by compare-exchange: between kReading and kPaused by the client, from kPaused to kOvertaken by
  // the daemon. So a pause and its end are seen without a message.
  alignas(128) std::atomic<uint32_t> pass;
  // Records written into the trace ring so far (trace_ring.h).
  alignas(128) std::atomic<uint64_t> trace_written;
};
static_assert(sizeof(ClientPage) <= 4096);

// Start of the daemon's page; read-only for the client, but where the client's GPU waits for its words: a stream that
// waits cannot be ended by anything but its word, so that client maps the page writable and moves its words to the next
// epoch itself when the daemon is dead, or a wait has taken too long. That is safe because the daemon never reads its
// own page back, and the page is this session's alone: whoever writes nonsense here deceives nobody but itself.
struct DaemonPage {
  static constexpr uint64_t kMagic = 0x7368617264644c31;
  uint64_t magic;
  uint64_t reserved[15];
  alignas(128) TimelineWord epoch;  // epoch << 40: a later epoch than the session's means it is over
  // In the epoch's line, which every call reads. Not 0: the client writes the trace ring, of which `trace_taken`
  // records are read.
  std::atomic<uint32_t> tracing;
  std::atomic<uint64_t> trace_taken;
  alignas(128) TimelineWord version;      // epoch << 40 | version of the parameters that is ready to be read
  alignas(128) TimelineWord consumed;     // epoch << 40 | ring records consumed
  alignas(128) TimelineWord full_params;  // epoch << 40 | number of EnterFullParams granted to this rank
  // epoch << 40 | backwards that this rank has closed in this session, that no rank can add to any more and whose
  // gradients are all in the gradient shards.
  alignas(128) TimelineWord reduced;
  // The same as soon as nothing that a rank does can hold it up: all that is to be added is with devices. A stream may
  // then wait for `reduced`.
  alignas(128) TimelineWord reducing;
  alignas(128) TimelineWord passes;  // epoch << 40 | EnterPass granted to this rank in this session
  // JobConfig.pass_copies: those that are granted as soon as devices have taken the copies, which nothing that a rank
  // does can hold up any more. A stream may then wait for `passes`.
  alignas(128) TimelineWord passes_issued;
  alignas(128) TimelineWord windows;  // epoch << 40 | OpenWindow granted
  // Non-zero while the daemon's loop is awake and will look at the ring before it sleeps: no doorbell needed.
  alignas(128) std::atomic<uint32_t> awake;
  alignas(128) TimelineWord tail[1];  // slot words, then group entries (DaemonPageView)
};

// Per gradient slot: epoch << 40 | submissions of this rank in this slot that the daemon has finished reading; and that
// it has come to read, which nothing that a rank does can hold up any more (a stream may then wait for `released`).
struct alignas(128) SlotEntry {
  TimelineWord released;
  TimelineWord issued;
};

// Per group: epoch << 40 | Unshard commands of this rank for the group that are done (a prefetch runs ahead of them).
struct alignas(128) GroupEntry {
  TimelineWord unsharded;
  // Where the group lies, POOLED: bytes from the start of the unsharded pool. Written before `issued`.
  std::atomic<int64_t> pool_offset_bytes;
  // Commands whose place is known and which nothing that a rank does can hold up any more, POOLED: a stream may then
  // wait for `unsharded`.
  TimelineWord issued;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_PAGE_H_
