#include <gtest/gtest.h>

#include <string>

#include "tests/torch/worker.h"

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--worker") {
    return shardd_test::RunWorker(argv[2]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
