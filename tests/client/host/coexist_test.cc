// The library beside torch, another gRPC and another protobuf in one process, all of them at work, in both orders of
// loading.

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "tests/client/client_fixture.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/sanitizers.h"

namespace shardd::testing_client {
namespace {

constexpr int kSomethingIsMissing = 77;

class Coexist : public ::testing::TestWithParam<const char*> {};

TEST_P(Coexist, ATrainerWorksBesideTorchAndAnotherGrpcAndProtobuf) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a library with a sanitizer cannot be loaded into a Python without it";
  }
  const std::string& source = built::kSourceDir;
  const std::string python = source + "/.venv/bin/python";
  if (access(python.c_str(), X_OK) != 0 || access(built::kLibrary.c_str(), R_OK) != 0) {
    GTEST_SKIP() << "needs " << python << " and " << built::kLibrary;
  }
  Daemon daemon;
  TempDir dir;
  dir.Write("spec.json", ToJson(SmallSpec("job", 1)));
  Child process = testing::Spawn({python, source + "/tests/client/host/coexist.py", built::kLibrary, daemon.address(),
                                  dir.File("spec.json"), source + "/proto", GetParam()},
                                 {.log = dir.File("output")});
  const int code = process.Wait();
  const std::string output = ReadWholeFile(dir.File("output"));
  if (code == kSomethingIsMissing) {
    GTEST_SKIP() << "not installed: " << output;
  }
  EXPECT_EQ(code, 0) << output;
  EXPECT_NE(output.find("ok\n"), std::string::npos) << output;
}
INSTANTIATE_TEST_SUITE_P(Orders, Coexist, ::testing::Values("others_first", "shardd_first"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shardd::testing_client
