#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_TRAINER_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_TRAINER_WORLD_H_

#include <memory>
#include <utility>
#include <vector>

#include "server/collective/trainers/sum_channel.h"
#include "server/collective/trainers/trainer_collective.h"
#include "server/device/devices.h"
#include "tests/server/collective/add_records.h"
#include "tests/server/collective/collective_fixture.h"

namespace shardd {

// One rank's library, as far as its ring goes: what it is told is done with the CPU's kernels, when it is asked to.
class FakeTrainer {
 public:
  static constexpr uint64_t kEpoch = 3;

  explicit FakeTrainer(int rank)
      : ring_(std::make_shared<SumRing>()),
        channel_(std::make_shared<SumChannel>(ring_.get(), &words_, kEpoch, rank, ring_)) {}
  SumRing& ring() { return *ring_; }
  SumWords& words() { return words_; }
  const std::shared_ptr<SumChannel>& channel() { return channel_; }
  uint64_t written() const { return TimelineSequence(ring_->written.load()); }
  const SumRecord& record(uint64_t n) const { return ring_->records[n % kSumRecords]; }

  // All that is there, and says so.
  void Add(const std::vector<const char*>& slots, char* gradients) {
    AddRecords(*ring_, &taken_, written(), slots, gradients);
    words_.summed.store(TimelineValue(kEpoch, taken_));
  }

 private:
  std::shared_ptr<SumRing> ring_;
  SumWords words_ = {};
  std::shared_ptr<SumChannel> channel_;
  uint64_t taken_ = 0;
};

// Trainers that add at once: `done` runs within ReduceScatter. Of every `nth` rank from 0 on; the others' devices add.
class PromptTrainers final : public Collective {
 public:
  PromptTrainers(std::vector<Device*> of_ranks, int nth) : ranks_(of_ranks.size()), inner_(std::move(of_ranks)) {
    for (size_t rank = 0; rank < ranks_; rank += static_cast<size_t>(nth)) {
      trainers_.push_back(std::make_unique<FakeTrainer>(static_cast<int>(rank)));
      inner_.SetSession(static_cast<int>(rank), 100 + rank, trainers_.back()->channel());
    }
  }
  const char* name() const override { return inner_.name(); }
  std::string Describe() const override { return inner_.Describe(); }
  void ReduceScatter(ReduceScatterRequest request, Done done) override {
    std::vector<const char*> slots(ranks_, nullptr);
    char* const gradients = request.gradients;
    for (const GradientSource& source : request.sources) {
      if (request.plan == nullptr || source.slot == nullptr || source.rank < 0 ||
          source.rank >= static_cast<int>(ranks_) || request.group < 0 ||
          request.group >= static_cast<int>(request.plan->groups.size())) {
        continue;  // refused
      }
      const int slot = request.plan->groups[static_cast<size_t>(request.group)].gradient_slot;
      slots[static_cast<size_t>(source.rank)] =
          source.slot - request.plan->gradient_slots[static_cast<size_t>(slot)].offset_bytes;
    }
    inner_.ReduceScatter(std::move(request), std::move(done));
    while (inner_.waiting()) {
      for (const auto& trainer : trainers_) trainer->Add(slots, gradients);
      (void)inner_.Poll();
    }
  }
  void AllGather(AllGatherRequest request, Done done) override {
    inner_.AllGather(std::move(request), std::move(done));
  }

 private:
  const size_t ranks_;
  TrainerCollective inner_;
  std::vector<std::unique_ptr<FakeTrainer>> trainers_;
};

// On CPU devices, whose memory trainers reach as they do.
class TrainerWorld final : public CollectiveWorld {
 public:
  TrainerWorld(int devices, int nth) : devices_(devices), nth_(nth) {}
  std::vector<std::unique_ptr<Device>> MakeDevices() override {
    return std::move(shardd::MakeDevices(absl::StrCat("cpu:", devices_))->devices);
  }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    return std::make_unique<PromptTrainers>(std::move(of_ranks), nth_);
  }

 private:
  const int devices_;
  const int nth_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_TRAINER_WORLD_H_
