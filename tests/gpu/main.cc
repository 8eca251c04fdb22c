#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/shm/unique_fd.h"
#include "server/custodian/custodian.h"
#include "tests/gpu/real_cuda_world.h"
#include "tests/gpu/trainer.h"
#include "tests/server/collective/nccl/nccl_node.h"

namespace {

// On the first GPU, as all nodes of this machine.
int RunNode(char** argv) {
  shardd::RealCudaWorld world;
  const char* const path = std::getenv("SHARDD_NCCL_LIBRARY");
  const auto library =
      shardd::NcclLibrary::Load(path == nullptr || *path == '\0' ? shardd::NcclLibrary::kDefault : path);
  if (!world.why_not().empty() || !library.ok()) {
    std::fprintf(stderr, "node: %s %s\n", world.why_not().c_str(), std::string(library.status().message()).c_str());
    return 100;
  }
  return shardd::RunNcclNode(argv, world, *library);
}

// shardd-custodian, as a process of this binary: it holds descriptors, and calls no driver.
int RunCustodian(const std::string& path) {
  const auto custodian = shardd::Custodian::Create({path});
  const shardd::UniqueFd never(eventfd(0, EFD_CLOEXEC));
  if (!custodian.ok()) return 101;
  (*custodian)->Run(never.get());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--custodian") == 0) return RunCustodian(argv[2]);
  if (const int result = shardd::cuda::RunTrainer(argc, argv); result >= 0) return result;
  if (shardd::IsNcclNode(argc, argv)) return RunNode(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
