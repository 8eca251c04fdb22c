#include "server/collective/nodes/node_sums.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/device/device.h"

namespace shardd {

void NodeSums::BeginLocked(uint64_t generation) {
  if (generation_.has_value() && generation <= *generation_) return;
  generation_ = generation;
  next_sequence_ = 0;
  next_exchanged_ = 0;
  broken_ = absl::OkStatus();
  tells_generation_ = true;
}

void NodeSums::Begin(uint64_t generation) {
  {
    absl::MutexLock lock(&mutex_);
    BeginLocked(generation);
  }
  Advance();
}

void NodeSums::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopped_ = true;
  }
  Advance();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](bool* is_advancing) { return !*is_advancing; }, &is_advancing_));
  exchange_ = nullptr;
}

absl::Status NodeSums::RefusalLocked(const ReduceScatterRequest& request) {
  const std::string what =
      absl::StrCat("reduce-scatter group \"", request.plan->groups[static_cast<size_t>(request.group)].name, "\": ");
  const ReduceScatterRequest::NodeSum& sum = *request.nodes;
  if (is_stopped_) return absl::CancelledError(absl::StrCat(what, "the job has ended"));
  BeginLocked(sum.generation);
  if (sum.generation < *generation_) {
    return absl::AbortedError(
        absl::StrCat(what, "the nodes' generation is over (got ", sum.generation, ", want ", *generation_, ")"));
  }
  if (sum.sequence != next_sequence_) {
    return absl::InvalidArgumentError(absl::StrCat(what, "not the next sum of generation ", sum.generation,
                                                   " (got sequence ", sum.sequence, ", want ", next_sequence_, ")"));
  }
  ++next_sequence_;
  return absl::OkStatus();
}

void NodeSums::Enter(ReduceScatterRequest request, Done done) {
  absl::Status status = CheckNodeSum(request, devices_.size());
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    status = RefusalLocked(request);
    if (status.ok()) {
      sums_.push_back(std::make_shared<Sum>());
      sums_.back()->request = std::move(request);
      sums_.back()->done = std::move(done);
    }
  }
  if (!status.ok()) End(std::move(done), request.label, std::move(status));
  Advance();
}

void NodeSums::Advance() {
  mutex_.Lock();
  // One thread at a time, so that calls without the lock happen in the order in which they were decided.
  if (!is_advancing_) {
    is_advancing_ = true;
    while (Step step = NextLocked()) {
      mutex_.Unlock();
      step();
      step = nullptr;  // releases what it holds before the lock
      mutex_.Lock();
    }
    is_advancing_ = false;
  }
  mutex_.Unlock();
}

NodeSums::Step NodeSums::NextLocked() {
  if (tells_generation_ && !is_stopped_) {
    tells_generation_ = false;
    return [exchange = exchange_, generation = *generation_] { exchange->Begin(generation); };
  }
  State before = State::kWriting;
  uint64_t generation = 0;
  for (const SumPtr& sum : sums_) {
    if (sum->generation() != generation) before = State::kWriting;
    generation = sum->generation();
    if (Step step = StepOfLocked(sum, before)) return step;
    if (sum->state == State::kWaiting) break;  // waits for a slot, and so do all after it
    before = std::min(before, sum->state);
  }
  return nullptr;
}

NodeSums::Step NodeSums::StepOfLocked(const SumPtr& of, State before) {
  SumPtr sum = of;  // a copy, because removing the sum drops the reference
  const auto self = shared_from_this();
  const bool is_under_way =
      sum->state == State::kAdding || sum->state == State::kExchanging || sum->state == State::kWriting;
  if (is_under_way) return nullptr;
  if (absl::Status end = EndOfLocked(*sum); !end.ok()) {
    RemoveLocked(sum);
    return [self, sum, end = std::move(end)] { self->End(std::move(sum->done), sum->request.label, end); };
  }
  if (sum->state == State::kWaiting) {
    const auto free = std::find(is_taken_.begin(), is_taken_.end(), false);
    if (free == is_taken_.end()) return nullptr;
    *free = true;
    sum->slot = static_cast<int>(free - is_taken_.begin());
    sum->state = State::kAdding;
    return [self, sum] { self->Add(sum); };
  }
  if (sum->state == State::kAdded && sum->ops.parts.empty()) sum->state = State::kExchanged;
  if (sum->state == State::kAdded && before >= State::kExchanging) {
    sum->state = State::kExchanging;
    return [self, sum, exchange = exchange_, sequence = next_exchanged_++] { self->Exchange(sum, exchange, sequence); };
  }
  if (sum->state == State::kExchanged && before == State::kWriting) {
    sum->state = State::kWriting;
    return [self, sum] { self->Write(sum); };
  }
  return nullptr;
}

absl::Status NodeSums::EndOfLocked(const Sum& sum) const {
  if (!sum.status.ok()) return sum.status;
  const auto what = [&sum] {
    return absl::StrCat("reduce-scatter group \"",
                        sum.request.plan->groups[static_cast<size_t>(sum.request.group)].name, "\": ");
  };
  if (sum.generation() != *generation_) {
    return absl::AbortedError(
        absl::StrCat(what(), "the nodes' generation was ended (got ", sum.generation(), ", want ", *generation_, ")"));
  }
  if (!broken_.ok()) return broken_;
  if (is_stopped_) return absl::CancelledError(absl::StrCat(what(), "the job has ended"));
  return absl::OkStatus();
}

void NodeSums::RemoveLocked(const SumPtr& sum) {
  if (sum->slot >= 0) is_taken_[static_cast<size_t>(sum->slot)] = false;
  sums_.erase(std::find(sums_.begin(), sums_.end(), sum));
}

void NodeSums::NoteErrorLocked(Sum& sum, absl::Status status) {
  if (broken_.ok() && sum.generation() == *generation_) broken_ = status;
  sum.status = std::move(status);
}

void NodeSums::Add(const SumPtr& sum) {
  std::vector<char*> staging = staging_;
  for (char*& of_rank : staging) of_rank += sum->slot * slot_bytes_;
  absl::StatusOr<NodeSumOps> ops = MakeNodeSumOps(local_, sum->request, staging, slot_bytes_);
  if (!ops.ok()) return Reached(sum, State::kAdded, ops.status());
  sum->ops = *std::move(ops);
  FanOut(
      PartsOf(std::move(sum->ops.add)), StreamId::kPostBackward, sum->request.label, devices_.front(), absl::OkStatus(),
      [self = shared_from_this(), sum](absl::Status status) { self->Reached(sum, State::kAdded, std::move(status)); });
}

void NodeSums::Exchange(const SumPtr& sum, NodeExchange* exchange, uint64_t sequence) {
  const auto done = [self = shared_from_this(), sum](absl::Status status) {
    self->Reached(sum, State::kExchanged, std::move(status));
  };
  if (sum->request.plan->cut_over_nodes) {
    exchange->ReduceScatter(sum->generation(), sequence, std::move(sum->ops.parts), sum->request.label, done);
  } else {
    exchange->AllReduce(sum->generation(), sequence, std::move(sum->ops.parts), sum->request.label, done);
  }
}

void NodeSums::Write(const SumPtr& sum) {
  FanOut(PartsOf(std::move(sum->ops.finish)), StreamId::kPostBackward, sum->request.label, devices_.front(),
         absl::OkStatus(),
         [self = shared_from_this(), sum](absl::Status status) { self->Written(sum, std::move(status)); });
}

void NodeSums::Reached(const SumPtr& sum, State state, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    sum->state = state;
    if (!status.ok()) NoteErrorLocked(*sum, std::move(status));
  }
  Advance();
}

void NodeSums::Written(const SumPtr& sum, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!status.ok()) NoteErrorLocked(*sum, status);
    RemoveLocked(sum);
  }
  if (sum->done) sum->done(std::move(status));
  sum->done = nullptr;  // what it holds may end with it
  Advance();
}

std::vector<DevicePart> NodeSums::PartsOf(std::vector<std::vector<DeviceOp>> by_rank) const {
  std::vector<DevicePart> parts;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::vector<DeviceOp>& ops = PartOf(parts, devices_[rank]).ops;
    std::move(by_rank[rank].begin(), by_rank[rank].end(), std::back_inserter(ops));
  }
  return parts;
}

void NodeSums::End(Done done, std::string label, absl::Status status) {
  devices_.front()->Submit(StreamId::kPostBackward,
                           {std::move(label), {}, [done = std::move(done), status](absl::Status) {
                              if (done) done(status);
                            }});
}

}  // namespace shardd
