#include "client/c/session/command_ring.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>

#include "client/c/session/record_command.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// Records that need no action may pile up; from here on the daemon is woken to drain them before the ring is full.
constexpr uint64_t kDrainRecords = kRingRecords / 2;

}  // namespace

void CommandRing::SendBy(StreamWriter* writer, const ShardPlan* plan) {
  writer_ = writer;
  plan_ = plan;
  layout_ = MakeSessionLayout(*plan);  // what a record names lies before the gradient slots, wherever those are
}

void CommandRing::Wake() {
  if (writer_ != nullptr) {
    writer_->Flush();
  } else if (memory_.page().awake.load(std::memory_order_seq_cst) == 0) {
    RingDoorbell();
  }
}

void CommandRing::RingDoorbell() {
  const uint64_t one = 1;
  ssize_t written = 0;
  do {
    written = write(memory_.doorbell(), &one, sizeof(one));
  } while (written < 0 && errno == EINTR);
  // EAGAIN: the counter is full, so the daemon has a wake-up pending anyway.
  ++doorbells_;
}

absl::Status CommandRing::WaitSpace(uint64_t records, const WaitFor& reason) {
  const uint64_t end = submitted_ + std::min<uint64_t>(records, kRingRecords);
  if (end - consumed_seen_ <= kRingRecords) {
    return absl::OkStatus();
  }
  consumed_seen_ = std::min(waits_.SequenceOf(memory_.page().consumed), submitted_);
  return end - consumed_seen_ <= kRingRecords ? absl::OkStatus() : WaitConsumed(end - kRingRecords, reason);
}

absl::Status CommandRing::Send(const CommandRecord& command, bool act, const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(WaitSpace(1, reason));
  Publish(command, act || submitted_ + 1 - rung_at_ >= kDrainRecords);
  return absl::OkStatus();
}

void CommandRing::Publish(const CommandRecord& command, bool wake) {
  const uint64_t number = submitted_++;
  if (wake) {
    rung_at_ = submitted_;
  }
  if (writer_ != nullptr) {
    writer_->Push(CommandOfRecord(command, *plan_, layout_, memory_.view()), wake);
    return;
  }
  CommandRecord& place = memory_.view().record(number);
  place = command;
  place.sequence = number;
  TimelineWord& word = memory_.view().page().submitted;
  if (!wake) {
    word.store(TimelineValue(epoch_, submitted_), std::memory_order_release);
    return;
  }
  // The daemon stores `awake` = 0 and then looks at `submitted` once more before it sleeps; both sides sequentially
  // consistent, so one of the two sees the other.
  word.store(TimelineValue(epoch_, submitted_), std::memory_order_seq_cst);
  Wake();
}

absl::Status CommandRing::WaitConsumed(uint64_t number, const WaitFor& reason) {
  if (number <= consumed_seen_) {
    return absl::OkStatus();
  }
  const TimelineWord& consumed = memory_.page().consumed;
  if (!waits_.Reached(consumed, number)) {
    Wake();
    SHARDD_RETURN_IF_ERROR(waits_.Wait(consumed, number, reason));
  }
  consumed_seen_ = std::max(consumed_seen_, std::min(waits_.SequenceOf(consumed), submitted_));
  return absl::OkStatus();
}

}  // namespace shardd
