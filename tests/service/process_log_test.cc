// Processes of tests, and what a sanitizer says in their logs.

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace shardd::testing {
namespace {

class ProcessLogTest : public ::testing::Test {
 protected:
  // It says so, and is killed: its exit code is that of any killed process.
  void SayAndDie(const std::string& text) const {
    const std::string log = folder_.File("log");
    const Child child = Spawn({"/bin/sh", "-c", "echo before; echo '" + text + "'; kill -9 $$"}, {.log = log});
    ASSERT_TRUE(PollUntil([&] { return ReadWholeFile(log).find(text) != std::string::npos; }));
  }
  TempDir folder_;
};

TEST_F(ProcessLogTest, ASanitizerReportFailsTheTestHoweverTheProcessEnds) {
  for (const char* report :
       {"WARNING: ThreadSanitizer: data race (pid=7)", "==7==ERROR: AddressSanitizer: heap-use-after-free",
        "==7==ERROR: LeakSanitizer: detected memory leaks", "a.cc:3:5: runtime error: shift exponent"}) {
    EXPECT_NONFATAL_FAILURE(SayAndDie(report), report);
  }
}

TEST_F(ProcessLogTest, OtherLinesDoNot) { SayAndDie("W 7 job llm error: rank 1 is lost"); }

}  // namespace
}  // namespace shardd::testing
