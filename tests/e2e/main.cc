// The tests, or, started by them with --worker, one rank.

#include <cstring>

#include "gtest/gtest.h"
#include "tests/e2e/trainer.h"

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--worker") == 0) {
    return shardd::e2e::Trainer(shardd::e2e::Args::Parse(argc, argv, 2)).Run();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
