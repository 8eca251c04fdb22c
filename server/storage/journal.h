#ifndef SHARDD_SERVER_STORAGE_JOURNAL_H_
#define SHARDD_SERVER_STORAGE_JOURNAL_H_

// The job's journal: a slab of its own with two places that decided steps take in turn, and a header that says which
// step is committed. A place is valid when its checksum fits, so a torn write leaves the other one. Where the daemon
// has a custodian, the one that takes its place completes the step that is decided and not committed (take_up_log.h).
//
//   header (64 bytes):  "SHJL" | u32 format | u64 epoch | i64 committed step | u64 version | u32 crc of these | 0...
//   place k at 64 + k * place_bytes:  v1::DecidedStepRecord (record_place.h)
//
// This is format 1; kJournalFormats says what this build reads. Magic and format have the same place in all formats,
// and a journal keeps its format for as long as its job lives.
//
// Who calls it: Commits::Decide (server/job/step/commits.cc) has a step written before any shard changes, and Committed
// (committed.cc there) the header with every epoch, step and version, both on the loop. The setup thread makes it
// (server/daemon/core_extend.cc); the next daemon reads it (server/daemon/take_up/taken_up_job.cc).

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "common/shm/slab.h"
#include "shardd/v1/journal.pb.h"

namespace shardd {

// Thread-compatible.
class Journal {
 public:
  struct Header {
    uint64_t epoch = 0;
    int64_t committed_step = 0;
    uint64_t version = 0;
  };
  // All of its memory is there when this returns: a decision does not fail for want of space. RESOURCE_EXHAUSTED: there
  // is none.
  static absl::StatusOr<std::unique_ptr<Journal>> Create(int64_t place_bytes);

  // Of the daemon before this one. DATA_LOSS: it is something else. FAILED_PRECONDITION: it is of a format that this
  // build does not read.
  static absl::StatusOr<std::unique_ptr<Journal>> TakeUp(UniqueFd fd, int64_t place_bytes);
  int fd() const { return slab_->fd(); }
  int format() const { return format_; }

  // Before any shard changes. RESOURCE_EXHAUSTED: the record is larger than a place; nothing is decided.
  absl::Status WriteDecided(const v1::DecidedStepRecord& record);
  absl::Status WriteHeader(const Header& header);
  // What was decided is lost: another node may send the step of that number that was decided in another attempt.
  void ForgetDecided();

  // DATA_LOSS: the checksum does not fit.
  absl::StatusOr<Header> ReadHeader() const;
  // The decided record of `step`; NOT_FOUND where neither place holds it.
  absl::StatusOr<v1::DecidedStepRecord> ReadDecided(int64_t step) const;

 private:
  static constexpr int64_t kHeaderBytes = 64;
  int64_t PlaceOf(int64_t step) const { return kHeaderBytes + step % 2 * place_bytes_; }
  Journal(std::unique_ptr<Slab> slab, int64_t place_bytes, int format)
      : slab_(std::move(slab)), place_bytes_(place_bytes), format_(format) {}
  const std::unique_ptr<Slab> slab_;
  const int64_t place_bytes_;
  const int format_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_JOURNAL_H_
