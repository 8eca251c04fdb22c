#include "tests/gpu/trainer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::cuda {
namespace {

constexpr char kFlag[] = "--trainer";
constexpr size_t kPageBytes = SharedPage::kWords * 64;

std::map<std::string, TrainerBody>& Bodies() {
  static auto* const bodies = new std::map<std::string, TrainerBody>;
  return *bodies;
}

}  // namespace

SharedPage::SharedPage(const Gpu& gpu) : driver_(gpu.driver()), fd_(memfd_create("shared page", 0)) {
  if (ftruncate(fd_.get(), kPageBytes) != 0) std::abort();
  Map();
}

SharedPage::SharedPage(const Gpu& gpu, int fd) : driver_(gpu.driver()), fd_(fd) { Map(); }

void SharedPage::Map() {
  words_ = static_cast<uint64_t*>(mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
  const CUresult result =
      driver_->MemHostRegister(words_, kPageBytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "cuMemHostRegister of a shared page: result %d\n", result);
  std::abort();
}

SharedPage::~SharedPage() {
  (void)driver_->MemHostUnregister(words_);
  munmap(words_, kPageBytes);
}

bool SharedPage::Await(int word, uint64_t value) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (int i = 1;; ++i) {
    if (Load(word) >= value) return true;
    if (i % 4096 == 0 && std::chrono::steady_clock::now() > end) return false;
  }
}

void LaunchWriter(Gpu& gpu, void* out, int numel, CUdeviceptr running, CUdeviceptr stop) {
  const CUkernel kernel = gpu.LoadKernel("shardd_test_write");
  void* params[] = {&out, &numel, &running, &stop};
  gpu.Check(gpu.driver()->LaunchKernel(cu::FunctionOf(kernel), 64, 1, 1, 256, 1, 1, 0, gpu.stream(), params, nullptr),
            "launch");
}

RegisterTrainer::RegisterTrainer(const char* name, TrainerBody body) { Bodies()[name] = body; }

testing::Child StartTrainer(const std::string& name, const SharedPage& page, std::vector<std::string> arguments) {
  std::vector<std::string> argv = {"/proc/self/exe", kFlag, name, absl::StrCat(page.fd())};
  for (std::string& argument : arguments) argv.push_back(std::move(argument));
  return testing::Spawn(argv);
}

UniqueFd Inherited(const UniqueFd& fd) { return UniqueFd(fcntl(fd.get(), F_DUPFD, 3)); }

int RunTrainer(int argc, char** argv) {
  if (argc < 4 || std::strcmp(argv[1], kFlag) != 0) return -1;
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) {
    std::fprintf(stderr, "trainer: %s\n", why.c_str());
    return 100;
  }
  SharedPage page(*gpu, std::atoi(argv[3]));
  return Bodies().at(argv[2])(*gpu, page, std::vector<std::string>(argv + 4, argv + argc));
}

}  // namespace shardd::cuda
