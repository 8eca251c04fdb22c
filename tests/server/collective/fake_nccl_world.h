#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_FAKE_NCCL_WORLD_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_FAKE_NCCL_WORLD_H_

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "server/collective/nccl/nccl_collective.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/collective_fixture.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd {

// What is broken is taken apart by a thread of its own, which calls the driver: it comes before the driver's end.
inline void AwaitEnd(const std::weak_ptr<NcclCommunicator>& communicator) {
  for (int i = 0; i < 10000 && !communicator.expired(); ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(communicator.expired());
}

// Fake GPUs, one for each rank, and the fake NCCL.
class NcclWorld final : public CollectiveWorld {
 public:
  explicit NcclWorld(int ranks) : ranks_(ranks), gpus_(/*delay_seed=*/5, ranks, /*queue_limit=*/1024) {}
  ~NcclWorld() override { AwaitEnd(made_); }
  std::vector<std::unique_ptr<Device>> MakeDevices() override { return gpus_.MakeAll(); }
  std::pmr::memory_resource* memory() override { return gpus_.memory(); }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    std::vector<int> ordinals(static_cast<size_t>(ranks_));
    std::iota(ordinals.begin(), ordinals.end(), 0);
    auto made = NcclCommunicator::Create(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), ordinals);
    EXPECT_TRUE(made.ok()) << made.status();
    made_ = *made;
    return std::make_unique<NcclCollective>(std::move(of_ranks), *std::move(made));
  }

 private:
  const int ranks_;
  FakeCudaWorld gpus_;
  std::weak_ptr<NcclCommunicator> made_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_FAKE_NCCL_WORLD_H_
