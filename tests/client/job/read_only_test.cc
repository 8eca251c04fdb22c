// Stores into what a program may only read, through the C ABI and a real daemon: the process ends, and a line on
// standard error says before which parameter it was, whoever else handles the signal, and in whatever thread.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "client/c/job/read_only_faults.h"
#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/testing/sanitizers.h"

namespace shardd::testing_client {
namespace {

constexpr char kShard[] = "shardd: write parameter \"b.bias\": the job was opened with trainers that never write";
constexpr char kOfTheProgram[] = "a fault of the program";

// As Python's faulthandler: writes, puts the handler back that it had found, and raises the signal anew. Once disabled
// it returns at once, should anybody still call it.
struct sigaction found_by_fault_handler;
bool fault_handler_enabled = false;
void WriteAndRaise(int signal) {
  if (!fault_handler_enabled) {
    return;
  }
  constexpr char kText[] = "a fault of the program\n";
  (void)!write(STDERR_FILENO, kText, sizeof(kText) - 1);
  sigaction(signal, &found_by_fault_handler, nullptr);
  raise(signal);
}
void EnableFaultHandler() {
  struct sigaction action = {};
  action.sa_handler = &WriteAndRaise;
  action.sa_flags = SA_NODEFER;
  ASSERT_EQ(sigaction(SIGSEGV, &action, &found_by_fault_handler), 0);
  fault_handler_enabled = true;
}
void DisableFaultHandler() {
  fault_handler_enabled = false;
  ASSERT_EQ(sigaction(SIGSEGV, &found_by_fault_handler, nullptr), 0);
}

class ReadOnly : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kSanitized) GTEST_SKIP() << "the handler before ours is the sanitizer's, which ends differently";
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child does not have the mappings
    ASSERT_EQ(sigaction(SIGSEGV, nullptr, &before_), 0);
    v1::JobSpec spec = SmallSpec("read-only", 1);
    spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
    spec.mutable_config()->mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
    ASSERT_C_OK(rank_.Attach(daemon_.address(), spec, 0));
    rank_.WriteAll(1.0f);
  }
  void TearDown() override {
    fault_handler_enabled = false;
    if (!IsSkipped()) {
      ASSERT_EQ(sigaction(SIGSEGV, &before_, nullptr), 0);
    }
  }
  void Watch() { ASSERT_C_OK(shardd_watch_writes(rank_.job(), 1)); }
  void Store() {
    alarm(20);  // an endless loop ends by another signal
    *StoredShard(rank_, rank_.Param("b.bias")) = 7;
  }
  void ExpectNamed(const std::string& text) { EXPECT_EXIT(Store(), ::testing::KilledBySignal(SIGSEGV), text); }
  static void FaultElsewhere() {
    alarm(20);
    *reinterpret_cast<volatile int*>(64) = 1;
  }
  Daemon daemon_;
  Rank rank_;
  struct sigaction before_ = {};
};

TEST_F(ReadOnly, StoringIntoAShardNamesItAndEndsTheProcess) {
  Watch();
  ExpectNamed(kShard);
  EXPECT_EQ(*StoredShard(rank_, rank_.Param("b.bias")), 1.0f);
}

TEST_F(ReadOnly, AStoreOfAnotherThreadIsNamedToo) {
  Watch();
  EXPECT_EXIT(std::thread([this] { Store(); }).join(), ::testing::KilledBySignal(SIGSEGV), kShard);
}

TEST_F(ReadOnly, AStoreIntoWhatIsUnshardedIsNamed) {
  Watch();
  const int param = rank_.Param("b.bias");
  rank_.Unshard(rank_.ParamInfo(param).group, SHARDD_FORWARD);
  auto* const unsharded = static_cast<uint16_t*>(const_cast<void*>(shardd_parameter_data(rank_.job(), param)));
  EXPECT_EXIT(*unsharded = 1, ::testing::KilledBySignal(SIGSEGV), "write unsharded parameter \"b.bias\"");
}

TEST_F(ReadOnly, StoresIntoOptimizerStateThatIsMappedLaterAreNamed) {
  Watch();
  auto* const state = static_cast<float*>(shardd_optimizer_state_data(rank_.job(), rank_.Param("b.bias"), 1));
  EXPECT_EXIT(*state = 1, ::testing::KilledBySignal(SIGSEGV),
              "write optimizer state of \"b.bias\".*--stock-optimizers");
}

TEST_F(ReadOnly, AFaultElsewhereIsNotNamed) {
  Watch();
  EXPECT_EXIT(FaultElsewhere(), ::testing::KilledBySignal(SIGSEGV), "^$");
}

TEST_F(ReadOnly, NothingIsNamedOnceItIsNotWatched) {
  Watch();
  ASSERT_C_OK(shardd_watch_writes(rank_.job(), 0));
  ExpectNamed("^$");
}

TEST_F(ReadOnly, AFaultHandlerOfBeforeIsHeardBehindTheName) {
  EnableFaultHandler();
  Watch();
  ExpectNamed("b.bias[^\n]*\n.*a fault of the program");
  EXPECT_EXIT(FaultElsewhere(), ::testing::KilledBySignal(SIGSEGV), kOfTheProgram);
}

TEST_F(ReadOnly, AFaultHandlerOfAfterwardsIsHeardBeforeTheName) {
  Watch();
  EnableFaultHandler();
  ExpectNamed("a fault of the program\n.*b.bias");
  EXPECT_EXIT(FaultElsewhere(), ::testing::KilledBySignal(SIGSEGV), kOfTheProgram);
}

TEST_F(ReadOnly, FaultsEndTheProcessIfThePreviousHandlerIsDisabled) {
  EnableFaultHandler();
  Watch();
  fault_handler_enabled = false;
  ExpectNamed(kShard);
  EXPECT_EXIT(FaultElsewhere(), ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(ReadOnly, FaultsEndTheProcessAfterALaterHandlerWasRemoved) {
  Watch();
  EnableFaultHandler();
  DisableFaultHandler();
  ExpectNamed(kShard);
}

TEST(ReadOnlyFaultsTest, AStoreIsFoundInItsPieceAndNowhereElse) {
  char memory[64] = {};
  ReadOnlyTexts texts;
  const int kind = texts.AddKind({"before ", " after"});
  texts.Add(memory + 32, 8, kind, "b");
  texts.Add(memory + 8, 8, kind, "a");
  texts.Sort();
  const auto line = [&](int at) {
    const auto parts = texts.Find(memory + at);
    return std::string(parts[0]) + std::string(parts[1]) + std::string(parts[2]);
  };
  EXPECT_EQ(line(7), "");
  EXPECT_EQ(line(8), "before a after");
  EXPECT_EQ(line(15), "before a after");
  EXPECT_EQ(line(16), "");
  EXPECT_EQ(line(39), "before b after");
  EXPECT_EQ(line(40), "");
}

TEST(ReadOnlyFaultsTest, OneJobTooManyIsRefusedUntilAnotherIsForgotten) {
  struct sigaction before = {};
  ASSERT_EQ(sigaction(SIGSEGV, nullptr, &before), 0);
  ReadOnlyTexts texts[ReadOnlyFaults::kMaxJobs + 1];
  for (int i = 0; i < ReadOnlyFaults::kMaxJobs; ++i) ASSERT_TRUE(ReadOnlyFaults::Watch(&texts[i]).ok());
  EXPECT_EQ(ReadOnlyFaults::Watch(&texts[ReadOnlyFaults::kMaxJobs]).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ReadOnlyFaults::Forget(&texts[3]));
  EXPECT_TRUE(ReadOnlyFaults::Watch(&texts[ReadOnlyFaults::kMaxJobs]).ok());
  for (const ReadOnlyTexts& of : texts) EXPECT_TRUE(ReadOnlyFaults::Forget(&of));
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
}

}  // namespace
}  // namespace shardd::testing_client
