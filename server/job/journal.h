#ifndef SHARDD_SERVER_JOB_JOURNAL_H_
#define SHARDD_SERVER_JOB_JOURNAL_H_

// The job's journal: one tmpfs file with two places that decided steps take in turn, and a header that says which step
// is committed. A place is valid when its checksum fits, so a torn write leaves the other one.
//
//   header (64 bytes):  "SHJL" | u32 format 1 | u64 epoch | i64 committed step | u64 version | u32 crc of these | 0...
//   place k at 64 + k * place_bytes:  u32 length | u32 crc | serialized v1::DecidedStepRecord

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"
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
  static absl::StatusOr<std::unique_ptr<Journal>> Create(const std::string& path, int64_t place_bytes);
  // Reads an existing one. DATA_LOSS: checksums do not fit.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(const std::string& path, int64_t place_bytes);

  // Before any shard changes. RESOURCE_EXHAUSTED: record larger than a place, or the tmpfs is full; nothing is decided.
  absl::Status WriteDecided(const v1::DecidedStepRecord& record);
  absl::Status WriteHeader(const Header& header);

  absl::StatusOr<Header> ReadHeader() const;
  // The decided record of `step`; NOT_FOUND where neither place holds it.
  absl::StatusOr<v1::DecidedStepRecord> ReadDecided(int64_t step) const;

 private:
  Journal(UniqueFd fd, int64_t place_bytes) : fd_(std::move(fd)), place_bytes_(place_bytes) {}
  UniqueFd fd_;
  const int64_t place_bytes_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOURNAL_H_
