// The tests, or, started by them, one node of those that are processes.

#include <gtest/gtest.h>

#include "tests/server/collective/nccl_node.h"

int main(int argc, char** argv) {
  if (const int result = shardd::RunNcclNode(argc, argv); result >= 0) return result;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
