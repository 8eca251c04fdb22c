#ifndef SHARDD_SERVER_STORAGE_TAKE_UP_LOG_H_
#define SHARDD_SERVER_STORAGE_TAKE_UP_LOG_H_

// What a daemon that takes up a job needs to know beside the job's slabs and its journal, which has the decided steps.
//
//   two headers (64 bytes each, written in turn; the valid one with the higher `sequence` counts):
//     "SHTU" | u32 format | u64 sequence | u64 epoch | i64 step | u64 version | u32 facts | u32 flags |
//     u32 counts | u32 crc | 0...
//   at 128, for each of the first ranks (24 bytes): u32 state (0: it has no process, 1: it has this one, 2: it has one
//   that is not known, 3: it has finished) | i32 pid | u32 uid | 0... | u64 start time in clock ticks
//   at 4096: an UpdateLog for each rank, of three arrays, or of four where an optimizer has three states (whose kinds a
//   daemon that knows of three arrays alone refuses by their names)
//   then two places for v1::CommittedRecord, and for a job over several nodes one for v1::PromisedStepRecord or
//   v1::PromisedValuesRecord
//
// `facts` says where step counts and trainers' states are: 0: what follows from the journal's record of the committed
// step; 1 and 2: in that place. `counts` says which memory the step and the facts are of (Counts); 3 is
// kSnapshotBeingTaken of which only what is copied behind the pass is not there yet, and which an older daemon refuses:
// it would copy all, and trainers store into shards meanwhile. 4 more than these: values lie in the shards that are
// neither a version nor taken back, where parameters are cut over nodes, so that an older daemon refuses the log: it
// takes nothing back there, and would serve them as the version before. 8 more: the promised step is one behind parts
// of it (PromisedStepRecord.parts), which an older daemon refuses, too. 16 more: the shards of the snapshot that counts
// are slab "parameters", and slab "snapshot" has none (format 2). Counts that this build does not know are a newer
// daemon's. `flags`: 1: touched; 2: the step behind the
// committed one is promised, and its record is there; 4: the ranks have finished; 8: values are promised to be the next
// version, and their record is there; 16: of two snapshots (over nodes) the second one is of the step.
//
// Formats are laid out alike. In format 2 the snapshot's shards may be slab "parameters", which a daemon that reads
// format 1 alone would never look for there. A log has the oldest format that says all that its job may need
// (FormatFor), so that older daemons take up as many jobs as they can, and keeps it for as long as the job lives. Magic
// and format have the same place in all formats; kTakeUpFormats says which ones this build reads.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/shm/slab.h"
#include "common/shm/unique_fd.h"
#include "common/tensor/update_log.h"
#include "server/device/slab_place.h"
#include "server/storage/take_up_facts.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

class PinnedMemory;

// Owns that memory. Thread-compatible, but for the updates of ranks.
class TakeUpLog {
 public:
  struct Header {
    uint64_t epoch = 0;
    int64_t step = 0;
    uint64_t version = 0;
  };
  struct Sizes {
    int64_t place_bytes = 0;
    int ranks = 0;
    bool promises = false;  // the job is over several nodes
    int parts = 1;          // of a rank's update, at most
    int arrays = 3;         // of an UpdateLog
  };
  static constexpr int kMostParts = 256;  // as --offload_threads
  static Sizes SizesFor(const ShardPlan& plan) {
    return {plan.memory.journal_bytes / 2, plan.world_size, /*promises=*/plan.nodes() > 1,
            plan.config.offload() == v1::OFFLOAD_HOST ? kMostParts : 1,
            plan.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER && plan.optimizer_states > 2 ? 4 : 3};
  }
  static int64_t SizeBytes(const Sizes& sizes) {
    return PlacesAt(sizes) + (sizes.promises ? 3 : 2) * sizes.place_bytes;
  }
  static constexpr int kOwnShards = 1;  // formats: the snapshot has shards of its own,
  static constexpr int kInCopies = 2;   // or they are what passes read
  static int FormatFor(const ShardPlan& plan, const SlabPlace& place);
  // Says that nothing is committed.
  static absl::StatusOr<std::unique_ptr<TakeUpLog>> Create(const Sizes& sizes, int format = kInCopies);
  // DATA_LOSS: it is not what another daemon has made for a job of that plan. FAILED_PRECONDITION: it is of a format
  // that this build does not read.
  static absl::StatusOr<std::unique_ptr<TakeUpLog>> TakeUp(UniqueFd fd, const Sizes& sizes);

  // For a job on GPUs, whose streams write the logs of updates. Errors as of RegisterHost.
  absl::Status PinFor(const SlabPlace& place);

  ~TakeUpLog();

  int fd() const { return slab_->fd(); }
  int format() const { return format_; }
  // A log of format 1 may that says so where it is taken up: a build of between the two formats has written it.
  bool may_say_in_copies() const { return format_ >= kInCopies || said_in_copies_; }
  int64_t size_bytes() const { return slab_->size_bytes(); }
  UpdateLog& update(int rank, int part = 0) const {
    const int64_t number = int64_t{rank} * sizes_.parts + part;
    return *slab_->At<UpdateLog>(kUpdatesAt + number * UpdateLog::SizeBytes(sizes_.arrays));
  }
  int parts() const { return sizes_.parts; }

  using Process = FormerProcess;
  void SetProcess(int rank, const Process& process);
  void ForgetProcess(int rank, bool finished);  // it has let go of everything; `finished`: it does not come again
  // Nothing: the rank has none.
  std::optional<Process> process(int rank) const;
  bool finished(int rank) const;

  using Counts = WhatCounts;
  // Nothing else has changed: what counts, and its step and facts, stay. As with all but Promise and KeepPromise,
  // nothing is promised from here on.
  void SetVersion(uint64_t epoch, uint64_t version);
  // The step is committed whose record the journal has.
  void CommitStep(const Header& header);
  // Anything else is committed, or taken over, or the snapshot counts from here on. Only CommitStep and Commit with
  // kShards let shards count again. With kSnapshot it is the snapshot that there is, wherever its shards are.
  // `second`: of two snapshots that one counts.
  absl::Status Commit(const v1::CommittedRecord& facts, const Header& header, Counts counts = Counts::kShards,
                      bool second = false);
  // What the daemon before had promised stays so behind the next Commit.
  void KeepPromise() { keeps_promise_ = true; }
  // REQUIRES: made with `promises`. RESOURCE_EXHAUSTED: it is too large.
  absl::Status Promise(const v1::PromisedStepRecord& record);
  absl::Status PromiseValues(const v1::PromisedValuesRecord& record);
  // Values are about to be written that are no version yet, or are one now, or taken back. Until then only a daemon
  // that takes them back reads this.
  void SetWriting(bool writing);
  // REQUIRES: kSnapshotBeingTaken counts, or the snapshot does.
  // `shards_in_copies`: its shards are what passes read (KeptPart::kStates), until the next one is begun or shards
  // count. REQUIRES for that: may_say_in_copies().
  void SnapshotTaken(bool shards_in_copies = false);
  // The rest of it is copied behind the pass. REQUIRES: kSnapshotBeingTaken counts.
  void SnapshotIsBehind();
  // What counts is not the shards: SetVersion tells the log of a commit.
  bool counts_snapshot() const { return counts_ != Counts::kShards; }
  // Ranks of this node come no more, and other nodes go on with what it holds.
  void Finish();
  // There is nothing to take up.
  void End();
  // From here to the next Commit what counts may differ from what is committed, by no decided step: nobody could say by
  // what.
  void Touch();

  // Of a daemon that has ended: what it left. `facts`: of the committed step, or absent where the journal has them.
  struct Left {
    Header header;
    bool touched = false;
    bool finished = false;
    Counts counts = Counts::kShards;
    bool second = false;            // of two snapshots it is that one that counts
    bool behind_pass = false;       // kSnapshotBeingTaken: KeptPart::kBehindPass is what is left of it
    bool shards_in_copies = false;  // kSnapshot: its shards are what passes read
    bool facts_in_journal = false;
    v1::CommittedRecord facts;
    std::optional<v1::PromisedStepRecord> promised;
    std::optional<v1::PromisedValuesRecord> promised_values;
  };
  absl::StatusOr<Left> Read() const;

 private:
  struct RawProcess;
  // Null: there are too many ranks, and it is not known of this one.
  RawProcess* RawProcessOf(int rank) const;
  static constexpr int64_t kUpdatesAt = 4096;
  static constexpr uint32_t kPromisePlace = 3;
  static int64_t PlacesAt(const Sizes& sizes) {
    return kUpdatesAt + static_cast<int64_t>(sizes.ranks) * sizes.parts * UpdateLog::SizeBytes(sizes.arrays);
  }
  TakeUpLog(std::unique_ptr<Slab> slab, const Sizes& sizes, int format);
  char* PlaceOf(uint32_t place) const {
    return slab_->At<char>(PlacesAt(sizes_) + (static_cast<int64_t>(place) - 1) * sizes_.place_bytes);
  }
  void Write();

  const std::unique_ptr<Slab> slab_;
  std::unique_ptr<PinnedMemory> pinned_;  // goes before what it names
  const Sizes sizes_;
  const int format_;
  bool said_in_copies_ = false;
  Header header_;
  uint64_t sequence_ = 0;
  uint32_t facts_ = 0;
  Counts counts_ = Counts::kShards;
  bool touched_ = false;
  enum class Promised { kNothing, kStep, kValues };
  Promised promised_ = Promised::kNothing;
  bool finished_ = false;
  bool second_ = false;
  bool behind_pass_ = false;
  bool shards_in_copies_ = false;
  bool writing_ = false;
  bool promised_parts_ = false;
  bool keeps_promise_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_TAKE_UP_LOG_H_
