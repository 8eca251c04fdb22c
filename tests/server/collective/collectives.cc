// What the collectives' suite runs on without a GPU.

#include "server/device/devices.h"
#include "tests/server/collective/nccl/fake_nccl_world.h"
#include "tests/server/collective/nodes/node_world.h"
#include "tests/server/collective/trainer_world.h"

namespace shardd {
namespace {

class LocalWorld final : public CollectiveWorld {
 public:
  explicit LocalWorld(int devices) : devices_(devices) {}
  std::vector<std::unique_ptr<Device>> MakeDevices() override {
    return std::move(shardd::MakeDevices(absl::StrCat("cpu:", devices_))->devices);
  }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    return std::make_unique<LocalCollective>(std::move(of_ranks));
  }

 private:
  const int devices_;
};

CollectiveImplementation Local() {
  return {"local", [](int, int devices) { return std::make_unique<LocalWorld>(devices); }};
}

}  // namespace

std::vector<CollectiveImplementation> Collectives() {
  return {Local(),
          {"nccl", [](int ranks, int) { return std::make_unique<NcclWorld>(ranks); }},
          {"ncclWindow", [](int ranks, int) { return std::make_unique<NcclWorld>(ranks, /*window=*/true); }},
          {"nodes", [](int, int devices) { return std::make_unique<NodeWorld>(devices); }, [] { return std::string(); },
           /*devices_add=*/true, /*rounds_sources=*/false},
          {"trainers", [](int, int devices) { return std::make_unique<TrainerWorld>(devices, /*nth=*/1); },
           [] { return std::string(); }, /*devices_add=*/false},
          {"trainersAndDevices", [](int, int devices) { return std::make_unique<TrainerWorld>(devices, /*nth=*/2); }}};
}

std::vector<CollectiveImplementation> LocalCollectives() { return {Local()}; }

}  // namespace shardd
