// The tests, or, started by them, one node of those that are processes.

#include <gtest/gtest.h>

#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/nccl/nccl_node.h"
#include "tests/server/device/fake_cuda_world.h"

int main(int argc, char** argv) {
  if (shardd::IsNcclNode(argc, argv)) {
    shardd::FakeCudaWorld world(/*delay_seed=*/7, /*gpus=*/2);
    return shardd::RunNcclNode(argv, world, shardd::NcclLibrary(shardd::fake_nccl::Table(), 22809));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
