#include "server/collective/trainers/sum_channel.h"

#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardd {

SumChannel::SumChannel(SumRing* ring, const SumWords* words, uint64_t epoch, int rank,
                       std::shared_ptr<const void> memory)
    : ring_(ring), words_(words), epoch_(epoch), rank_(rank), memory_(std::move(memory)) {
  ring_->written.store(TimelineValue(epoch, 0));
}

bool SumChannel::Write(const SumRecord& record) {
  if (written_ - summed_ >= kSumRecords) {
    return false;
  }
  SumRecord& place = ring_->records[written_ % kSumRecords];
  place = record;
  place.sequence = written_++;
  return true;
}

void SumChannel::Publish() { TimelineStore(ring_->written, TimelineValue(epoch_, written_), &words_->waiting); }

absl::StatusOr<uint64_t> SumChannel::Summed() {
  const uint64_t word = words_->summed.load(std::memory_order_acquire);
  if (word != 0) {  // 0: as it was allocated
    const uint64_t summed = TimelineSequence(word);
    if (TimelineEpoch(word) != epoch_ || summed < summed_ || summed > written_) {
      return absl::InvalidArgumentError(absl::StrCat("sums: the word of what is added is out of range (got ", summed,
                                                     " of epoch ", TimelineEpoch(word), ", want ", summed_, " to ",
                                                     written_, " of epoch ", epoch_, "; rank=", rank_, ")"));
    }
    summed_ = summed;
  }
  if (summed_ < written_ && words_->ended.load(std::memory_order_acquire) != 0) {
    char text[sizeof(words_->error)];
    std::memcpy(text, words_->error, sizeof(text));
    return absl::AbortedError(absl::StrCat(
        "sums: rank ", rank_, " has ended before it has added what it was told (got ", summed_, ", want ", written_,
        "; rank=", rank_, "): ", absl::CHexEscape(std::string(text, strnlen(text, sizeof(text))))));
  }
  return summed_;
}

bool SumChannel::idle() const {
  return words_->summed.load(std::memory_order_acquire) == TimelineValue(epoch_, written_) || written_ == 0 ||
         words_->ended.load(std::memory_order_acquire) != 0;
}

void SumChannel::Poison(uint64_t epoch) { TimelineStore(ring_->written, TimelineValue(epoch, 0), &words_->waiting); }

}  // namespace shardd
