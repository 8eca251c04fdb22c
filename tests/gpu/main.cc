#include <gtest/gtest.h>

#include "tests/gpu/trainer.h"

int main(int argc, char** argv) {
  if (const int result = shardd::cuda::RunTrainer(argc, argv); result >= 0) return result;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
