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
  // `memory` is what both objects lie in. The ring is as it was allocated: zero.
  SumChannel(SumRing* ring, const SumWords* words, uint64_t epoch, int rank, std::shared_ptr<const void> memory);

  uint64_t written() const { return written_; }
  // Whose gradient slots a record means by `rank`. Before the record is published. REQUIRES: rank < kMaxSumRanks.
  void SetPeer(int rank, uint64_t session_id) { ring_->sessions[rank].store(session_id, std::memory_order_relaxed); }
  // False: kSumRecords are under way. Else the record is there, with its sequence, and seen after Publish.
  bool Write(const SumRecord& record);
  void Publish();
  // How many have come to their end, as the client's GPU says. INVALID_ARGUMENT: it says what cannot be. ABORTED: the
  // client has given up, with its words.
  absl::StatusOr<uint64_t> Summed();
  // Nothing that was written can touch memory any more, nor will: it has, or the client says so.
  bool idle() const;
  // Lets the client's thread go: nothing is read from here any more.
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
