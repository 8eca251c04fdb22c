// A trainer in another language, without our library, trains over gRPC alone.

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr int kSkipped = 77;

TEST(StreamClient, TrainsWithAPlainGrpcClientInPython) {
  const testing::TempDir dir;
  const testing::DaemonProcess daemon(dir.path(), "cpu:1");
  ASSERT_TRUE(daemon.listened()) << testing::ReadWholeFile(daemon.log());
  const std::string log = dir.File("client.log");
  // Debian's python3: another one in PATH does not see the packaged modules.
  testing::Child client =
      testing::Spawn({"/usr/bin/python3", absl::StrCat(built::kSourceDir, "/tests/service/stream_client.py"),
                      daemon.address(), absl::StrCat(built::kSourceDir, "/proto")},
                     {.log = log});
  const int code = client.Wait();
  const std::string output = testing::ReadWholeFile(log);
  if (code == kSkipped || code == 127) {
    GTEST_SKIP() << "no plain client: " << output;
  }
  ASSERT_EQ(code, 0) << output << testing::ReadWholeFile(daemon.log());
  EXPECT_THAT(output, ::testing::HasSubstr("trained 1 step; the words say ['consumed', "));
}

}  // namespace
}  // namespace shardd
