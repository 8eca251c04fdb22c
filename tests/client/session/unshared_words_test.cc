// Where a sandbox lets a process map the job's slabs, but not the words that it would share with the daemon.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

constexpr int kSkipped = 77;

struct Outcome {
  int code = 0;
  std::string output;
};

// One rank trains a step where the session's memory cannot be mapped.
Outcome TrainUnshared(std::vector<std::string> environment) {
  const Daemon daemon(1);
  const TempDir dir;
  environment.insert(environment.end(), {"TEST_ADDRESS=" + daemon.address(), "TEST_RANK=0", "TEST_WORLD=1"});
  Child child = SpawnProgram("train_without_shared_words", environment, dir.File("output"));
  Outcome outcome;
  outcome.code = child.Wait();
  outcome.output = ReadWholeFile(dir.File("output"));
  return outcome;
}

TEST(UnsharedWords, AreToldOverGrpcInstead) {
  const Outcome outcome = TrainUnshared({"SHARDD_CONTROL="});
  if (outcome.code == kSkipped) GTEST_SKIP() << "seccomp is not allowed here: " << outcome.output;
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(absl::StrContains(outcome.output, "trained 1 step")) << outcome.output;
  EXPECT_TRUE(absl::StrContains(outcome.output,
                                "shardd: rank 0: control is by gRPC alone: attach: cannot map the session memory"))
      << outcome.output;
}

TEST(UnsharedWords, EndTheAttachThatInsistsOnTheRing) {
  const Outcome outcome = TrainUnshared({"SHARDD_CONTROL=ring"});
  if (outcome.code == kSkipped) GTEST_SKIP() << "seccomp is not allowed here: " << outcome.output;
  EXPECT_EQ(outcome.code, 1) << outcome.output;
  EXPECT_TRUE(absl::StrContains(outcome.output, absl::StrCat("code ", kPermissionDenied))) << outcome.output;
  EXPECT_TRUE(absl::StrContains(outcome.output, "cannot map the session memory")) << outcome.output;
}

}  // namespace
}  // namespace shardd::testing_client
