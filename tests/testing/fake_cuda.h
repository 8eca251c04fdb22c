#ifndef SHARDD_TESTS_TESTING_FAKE_CUDA_H_
#define SHARDD_TESTS_TESTING_FAKE_CUDA_H_

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardd::testing {

// What makes a process that is started with it find `gpus` fake GPUs, where it looks for libcuda.so.1 itself or calls
// somebody who does; `more` is "FAKE_CUDA_X=value" (tests/fakes/cuda/README.md).
inline std::vector<std::string> FakeCudaEnvironment(int gpus, const std::vector<std::string>& more = {}) {
  std::vector<std::string> environment = {absl::StrCat("LD_LIBRARY_PATH=", SHARDD_FAKE_CUDA_DIR),
                                          absl::StrCat("FAKE_CUDA_DEVICES=", gpus)};
  environment.insert(environment.end(), more.begin(), more.end());
  return environment;
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_FAKE_CUDA_H_
