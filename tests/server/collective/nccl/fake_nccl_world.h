#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_FAKE_NCCL_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_FAKE_NCCL_WORLD_H_

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "server/collective/nccl/nccl_collective.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/collective_fixture.h"
#include "tests/server/collective/nccl/await_ends.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {

// Fake GPUs, one for each rank, and the fake NCCL; with a window, gradient slots lie in slabs that are it.
class NcclWorld final : public CollectiveWorld {
 public:
  explicit NcclWorld(int ranks, bool window = false)
      : ranks_(ranks), window_(window), gpus_(/*delay_seed=*/5, ranks, /*queue_limit=*/1024) {}
  ~NcclWorld() override { AwaitEnd(made_); }
  std::vector<std::unique_ptr<Device>> MakeDevices() override {
    std::vector<std::unique_ptr<Device>> devices = gpus_.MakeAll();
    std::vector<DeviceMemory*> users;
    for (const auto& device : devices) users.push_back(device->memory());
    for (const auto& device : devices) {
      if (!window_) break;
      slabs_.push_back(*device->memory()->MakeSlab("slots", kSlotsBytes, users));
      slots_.push_back(std::make_unique<std::pmr::monotonic_buffer_resource>(slabs_.back()->data(), kSlotsBytes,
                                                                             std::pmr::null_memory_resource()));
    }
    return devices;
  }
  std::pmr::memory_resource* memory() override { return gpus_.memory(); }
  std::pmr::memory_resource* slot_memory(int rank) override {
    return window_ ? slots_[static_cast<size_t>(rank)].get() : memory();
  }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    std::vector<int> ordinals(static_cast<size_t>(ranks_));
    std::iota(ordinals.begin(), ordinals.end(), 0);
    NcclCommunicator::Options options;
    options.takes_window = window_;
    auto made = NcclCommunicator::Create(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), ordinals, options);
    EXPECT_TRUE(made.ok()) << made.status();
    made_ = *made;
    auto collective = std::make_unique<NcclCollective>(std::move(of_ranks), *std::move(made));
    for (size_t rank = 0; rank < slabs_.size(); ++rank) collective->SetSlots(static_cast<int>(rank), slabs_[rank]);
    return collective;
  }
  void CollectiveIsGone() override {
    if (const auto made = made_.lock(); made != nullptr && window_) {
      const absl::Status broken = made->broken();
      // A case that shuts a device down breaks it, if its end has not come first.
      EXPECT_TRUE(broken.ok() || absl::StrContains(broken.message(), "device is shut down")) << broken;
    }
    AwaitEnd(made_);
    slots_.clear();
    slabs_.clear();
  }

 private:
  static constexpr int64_t kSlotsBytes = 4 << 20;
  const int ranks_;
  const bool window_;
  FakeCudaWorld gpus_;
  std::weak_ptr<NcclCommunicator> made_;
  std::vector<std::shared_ptr<const DeviceSlab>> slabs_;  // by rank
  std::vector<std::unique_ptr<std::pmr::monotonic_buffer_resource>> slots_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_FAKE_NCCL_WORLD_H_
