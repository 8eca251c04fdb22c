#ifndef SHARDD_TESTS_GPU_TRAINER_H_
#define SHARDD_TESTS_GPU_TRAINER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/shm/unique_fd.h"
#include "tests/gpu/gpu.h"
#include "tests/testing/process.h"

namespace shardd::cuda {

// Words that two processes and their GPU share, as a session's page is: a memfd, registered by each.
class SharedPage {
 public:
  static constexpr int kWords = 64;  // each in a cache line of its own
  explicit SharedPage(const Gpu& gpu);
  SharedPage(const Gpu& gpu, int fd);  // of a page that another process made; takes `fd`
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;
  ~SharedPage();

  int fd() const { return fd_.get(); }
  uint64_t Load(int word) const { return __atomic_load_n(At(word), __ATOMIC_ACQUIRE); }
  void Store(int word, uint64_t value) { __atomic_store_n(At(word), value, __ATOMIC_RELEASE); }
  CUdeviceptr Address(int word) const { return reinterpret_cast<CUdeviceptr>(At(word)); }
  // False where the word is less than `value` after half a minute. Spins.
  bool Await(int word, uint64_t value) const;

 private:
  uint64_t* At(int word) const { return words_ + 8 * word; }
  void Map();

  const CudaDriver& driver_;
  const UniqueFd fd_;
  uint64_t* words_ = nullptr;
};

// Runs a kernel on stream() that sets word `running`, and writes `numel` floats over and over until word `stop` is set.
void LaunchWriter(Gpu& gpu, void* out, int numel, CUdeviceptr running, CUdeviceptr stop);

// What a second process of this binary does. `gpu` is its own, `page` that of the process that started it.
using TrainerBody = int (*)(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments);
// A body by its name. At namespace scope.
struct RegisterTrainer {
  RegisterTrainer(const char* name, TrainerBody body);
};
// Descriptors among the arguments are to be without CLOEXEC (Inherited). Its result is the body's; 100: no GPU there.
testing::Child StartTrainer(const std::string& name, const SharedPage& page, std::vector<std::string> arguments = {});
// A copy that a process that is started has too, under the same number.
UniqueFd Inherited(const UniqueFd& fd);

// Of main: what the command line asks for where it is a trainer's, else -1.
int RunTrainer(int argc, char** argv);

}  // namespace shardd::cuda

#endif  // SHARDD_TESTS_GPU_TRAINER_H_
