#ifndef SHARDD_SERVER_COLLECTIVE_TRAINERS_SUM_CHANNEL_H_
#define SHARDD_SERVER_COLLECTIVE_TRAINERS_SUM_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/sum_ring.h"

namespace shardd {

// The daemon's end of one session's sum ring (common/shm/sum_ring.h). Loop-confined.
class SumChannel {
 public:
  // `memory` owns both objects. The ring must be as allocated: zero.
  SumChannel(SumRing* ring, const SumWords* words, uint64_t epoch, int rank, std::shared_ptr<const void> memory);

  uint64_t written() const { return written_; }
  // Sets the session whose gradient slots a record means by `rank`, before the record is published. REQUIRES: rank <
  // kMaxSumRanks.
  void SetPeer(int rank, uint64_t session_id) { ring_->sessions[rank].store(session_id, std::memory_order_relaxed); }
  // Returns false if kSumRecords are under way. Otherwise writes the record with its sequence; the client sees it after
  // Publish.
  bool Write(const SumRecord& record);
  void Publish();
  // Number of records that are done, as the client's GPU reports. INVALID_ARGUMENT: an impossible number. ABORTED: the
  // client has given up, with its text.
  absl::StatusOr<uint64_t> Summed();
  // True if nothing that was written can touch memory any more: it is done, or the client says so.
  bool idle() const;
  // Releases the client's thread: it reads no more from here.
  void Poison(uint64_t epoch);

 private:
  SumRing* const ring_;
  const SumWords* const words_;
  const uint64_t epoch_;
  const int rank_;
  const std::shared_ptr<const void> memory_;
  // The daemon never reads its own page back.
  uint64_t written_ = 0;
  uint64_t summed_ = 0;  // as last read
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_TRAINERS_SUM_CHANNEL_H_
