// The real daemon as a process, on GPUs that are the fake driver's: it finds libcuda.so.1 as on any machine.

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"
#include "tests/testing/sanitizers.h"

namespace shardd {
namespace {

using ::shardd::testing::DaemonProcess;
using ::shardd::testing::FakeCudaEnvironment;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// What a daemon said that ends before it listens.
std::string Refusal(const std::string& devices, const std::vector<std::string>& environment,
                    const std::vector<std::string>& flags = {}) {
  const ::shardd::testing::TempDir folder;
  DaemonProcess daemon(folder.path(), devices, flags, environment);
  EXPECT_FALSE(daemon.listened());
  EXPECT_EQ(daemon.process().Wait(), 1);
  return ::shardd::testing::ReadWholeFile(daemon.log());
}

TEST(CudaDaemonTest, AMachineThatCannotServeSaysWhichGpuAndWhy) {
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(0)),
              AllOf(HasSubstr("make devices \"cuda:all\""), HasSubstr("finds no usable GPU: cuInit"),
                    HasSubstr("CUDA_ERROR_NO_DEVICE")));
  EXPECT_THAT(Refusal("cuda:0,2", FakeCudaEnvironment(2)), HasSubstr("find GPU 2: the driver shows 2"));
  // The first GPU's context is fine, the second's is not.
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(2, {"FAKE_CUDA_FAIL=cuDevicePrimaryCtxRetain:2:2"})),
              AllOf(HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"), HasSubstr("device=cuda:1")));
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_MEMOPS=0"})),
              HasSubstr("use cuda:0: the GPU has no 64-bit stream memory operations"));
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_DRIVER_VERSION=11080"})),
              HasSubstr("it is too old (got CUDA 11.8, want 12.0 or later)"));
  // A kernel that is not there, which the daemon asks for by name.
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_FAIL=cuLibraryGetKernel:3:500"})),
              AllOf(HasSubstr("cuLibraryGetKernel"), HasSubstr("CUDA_ERROR_NOT_FOUND")));
}

TEST(CudaDaemonTest, MissingNcclIsAnErrorThatSaysWhatToDo) {
  EXPECT_THAT(Refusal("cpu:2", {}, {"--collective=nccl"}),
              HasSubstr("--collective: NCCL is for GPUs (got \"nccl\" with --devices=cpu:2"));
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(2), {"--collective=gloo"}),
              HasSubstr("--collective: unknown (got \"gloo\""));
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(2), {"--collective=nccl", "--nccl_library=/not/here.so"}),
              AllOf(HasSubstr("load NCCL \"/not/here.so\": it cannot be loaded"), HasSubstr("nvidia-nccl-cu13")));
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(2, {"FAKE_NCCL_VERSION=22100"}), {"--collective=nccl"}),
              HasSubstr("it is too old (got 2.21.0, want 2.28.0 or later)"));
}

// What shardctl prints, on either stream.
std::string Shardctl(const DaemonProcess& daemon, const ::shardd::testing::TempDir& folder, const std::string& command,
                     const std::vector<std::string>& flags = {}) {
  const std::string log = folder.File(absl::StrCat(command, flags.size()));  // the log of a process is appended to
  std::vector<std::string> args = {::shardd::testing::ProgramPath("shardctl"), "--address=" + daemon.address()};
  args.insert(args.end(), flags.begin(), flags.end());
  args.push_back(command);
  ::shardd::testing::Child child = ::shardd::testing::Spawn(args, {.log = log});
  EXPECT_EQ(child.Wait(), 0);
  return ::shardd::testing::ReadWholeFile(log);
}

TEST(CudaDaemonTest, EveryGpuIsServedWithItsStreamsUnderItsName) {
  const ::shardd::testing::TempDir folder;
  DaemonProcess daemon(folder.path(), "cuda:1,0", {}, FakeCudaEnvironment(2));
  ASSERT_TRUE(daemon.listened()) << ::shardd::testing::ReadWholeFile(daemon.log());
  // It says so once it listens: later than a connection may come.
  EXPECT_TRUE(::shardd::testing::PollUntil([&] {
    return absl::StrContains(::shardd::testing::ReadWholeFile(daemon.log()), "with 2 device(s)");
  })) << ::shardd::testing::ReadWholeFile(daemon.log());
  EXPECT_THAT(Shardctl(daemon, folder, "status"), ContainsRegex("devices +cuda:1 cuda:0\n"));  // in the order asked for
  const std::string streams = Shardctl(daemon, folder, "streams");
  for (const char* gpu : {"cuda:0", "cuda:1"}) {
    for (const char* stream : {"unshard", "post_backward", "optimizer"}) {
      EXPECT_THAT(streams, ContainsRegex(absl::StrCat(gpu, " +", stream, " +0 +0 +0")));
    }
  }
  daemon.process().Kill(SIGTERM);
  EXPECT_EQ(daemon.process().Wait(), 0);
}

// What status says of gradients, of a daemon on so many GPUs with its socket in `folder`.
std::string ChoiceOf(const ::shardd::testing::TempDir& folder, const char* devices,
                     const std::vector<std::string>& environment, const std::vector<std::string>& flags = {}) {
  std::vector<std::string> all = {"--collective=auto"};
  all.insert(all.end(), flags.begin(), flags.end());
  DaemonProcess daemon(folder.path(), devices, all, FakeCudaEnvironment(2, environment));
  EXPECT_TRUE(daemon.listened()) << ::shardd::testing::ReadWholeFile(daemon.log());
  const ::shardd::testing::TempDir logs;
  const std::string status = Shardctl(daemon, logs, "status");
  daemon.process().Kill(SIGTERM);
  EXPECT_EQ(daemon.process().Wait(), 0);
  const size_t begin = status.find("gradients between GPUs");
  return begin == std::string::npos ? "" : status.substr(begin, status.find('\n', begin) - begin);
}

// Slower than the other, which a sanitizer slows down; and not as slow as a trial gives up.
std::string Slow(const std::string& what) {
  return absl::StrCat(what, "=", ::shardd::testing::kSanitized ? 2'500'000 : 800'000);
}

TEST(CudaDaemonTest, ATrialAtTheStartChoosesTheCollective) {
  const ::shardd::testing::TempDir nccl_wins, copies_win;
  EXPECT_THAT(ChoiceOf(nccl_wins, "cuda:all", {Slow("FAKE_CUDA_ADD_US")}),
              ContainsRegex("GPUs +nccl: NCCL took [0-9]+ us for a sum of 32 MiB on each GPU, the GPUs' own copies "
                            "[0-9]{6,} us$"));
  EXPECT_THAT(ChoiceOf(copies_win, "cuda:all", {Slow("FAKE_NCCL_SUM_US")}),
              ContainsRegex("GPUs +local: NCCL took .*, and it has to be a tenth faster$"));
  // Of the same machine the result is kept, whatever a second trial would find.
  EXPECT_THAT(ChoiceOf(nccl_wins, "cuda:all", {Slow("FAKE_NCCL_SUM_US")}),
              AllOf(HasSubstr("nccl: NCCL took"), HasSubstr("(measured by an earlier start)")));
  // Another NCCL makes it another machine.
  EXPECT_THAT(ChoiceOf(nccl_wins, "cuda:all", {Slow("FAKE_NCCL_SUM_US"), "FAKE_NCCL_VERSION=22900"}),
              AllOf(HasSubstr("local: NCCL took"), Not(HasSubstr("earlier start"))));
}

// Whatever a trial does to its process, the daemon serves, and the next one does not try it again.
TEST(CudaDaemonTest, ATrialThatKillsOrHangsCostsOneStart) {
  const ::shardd::testing::TempDir dies, hangs;
  for (const char* again : {"", " \\(in an earlier start; without the file .*"}) {
    EXPECT_THAT(ChoiceOf(dies, "cuda:all", {"FAKE_NCCL_DIE=CommInitRankConfig:2"}),
                ContainsRegex(absl::StrCat("local: a trial of both went wrong: its process ended without a result; .*",
                                           again, "$")));
  }
  const std::vector<std::string> hanging = {"FAKE_NCCL_SUM_US=1000000000"};
  EXPECT_THAT(ChoiceOf(hangs, "cuda:all", hanging),
              HasSubstr("local: a trial of both went wrong: a sum of 32 MiB by nccl took longer than 5s"));
  EXPECT_THAT(ChoiceOf(hangs, "cuda:all", hanging), HasSubstr("took longer than 5s (in an earlier start;"));
}

// The sums of jobs that it takes up stay what they were, though its version would have it measure again.
TEST(CudaDaemonTest, ADaemonThatTakesOverGoesByTheFile) {
  const ::shardd::testing::TempDir folder, empty;
  ASSERT_THAT(ChoiceOf(folder, "cuda:all", {Slow("FAKE_CUDA_ADD_US")}), HasSubstr("nccl: NCCL took"));
  const std::vector<std::string> newer = {Slow("FAKE_NCCL_SUM_US"), "FAKE_NCCL_VERSION=22900"};
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", newer, {"--take_over"}),
              AllOf(HasSubstr("nccl: NCCL took"), HasSubstr("(measured by an earlier start)")));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", newer), HasSubstr("nccl: NCCL took"));  // started again, after a crash
  EXPECT_THAT(ChoiceOf(empty, "cuda:all", newer, {"--take_over"}),
              HasSubstr("local: the daemon whose place this one took has left no result of a trial"));
}

TEST(CudaDaemonTest, WithoutATrialStatusSaysWhy) {
  const ::shardd::testing::TempDir folder, refusing, failing;
  EXPECT_THAT(ChoiceOf(folder, "cuda:1", {}), HasSubstr("local: there is one GPU"));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", {}, {"--nccl_library=/not/here.so"}),
              HasSubstr("local: load NCCL \"/not/here.so\": it cannot be loaded"));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", {"FAKE_CUDA_PEERS=0"}),
              HasSubstr("nccl: the GPUs do not reach each other's memory (cuda:0 does not reach cuda:1)"));
  EXPECT_THAT(ChoiceOf(refusing, "cuda:all", {"FAKE_NCCL_FAIL=CommInitRankConfig:1"}),
              ContainsRegex("local: a trial of both went wrong: .*ncclCommInitRankConfig"));
  EXPECT_THAT(ChoiceOf(failing, "cuda:all", {"FAKE_NCCL_FAIL=ReduceScatter:2"}),
              ContainsRegex("local: a trial of both went wrong: .*ncclReduceScatter"));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", {}, {"--embedded"}),
              HasSubstr("local: a daemon that a program has started"));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", {}, {"--collective=local"}), HasSubstr("local: --collective=local"));
  EXPECT_THAT(ChoiceOf(folder, "cuda:all", {}, {"--collective=nccl"}), HasSubstr("nccl: --collective=nccl"));
  EXPECT_EQ(ChoiceOf(folder, "cpu:2", {}), "");
}

constexpr char kWarns[] = " W ";  // a line of the log

struct StatusText {
  std::string log, plain, json;
};
StatusText StatusOf(const std::vector<std::string>& environment) {
  const ::shardd::testing::TempDir folder;
  const DaemonProcess daemon(folder.path(), "cuda:all", {}, FakeCudaEnvironment(2, environment));
  EXPECT_TRUE(daemon.listened()) << ::shardd::testing::ReadWholeFile(daemon.log());
  return {::shardd::testing::ReadWholeFile(daemon.log()), Shardctl(daemon, folder, "status"),
          Shardctl(daemon, folder, "status", {"--json"})};
}

TEST(CudaDaemonTest, StatusShowsHowEachGpuIsSet) {
  const StatusText status = StatusOf({});
  EXPECT_THAT(status.plain, HasSubstr("Fake GPU, 64 GiB, 4 multiprocessors, at 0000:40:00.0, MPS off, persistence mode "
                                      "on, compute mode default\n"));
  EXPECT_THAT(status.plain, ContainsRegex("cuda:1 .* at 0000:41:00.0, MPS off"));
  EXPECT_THAT(status.json, ContainsRegex("\"persistence_mode\": *\"on\""));
  // No lazy loading either: the daemon has asked for that.
  EXPECT_THAT(status.log, Not(HasSubstr(kWarns)));
  EXPECT_THAT(status.plain, Not(HasSubstr("warning")));
  EXPECT_THAT(status.json, ContainsRegex("\"warnings\": *\\[\\]"));
}

TEST(CudaDaemonTest, GpuTrapsAreLoggedAndShownWithARemedy) {
  const StatusText status = StatusOf({"FAKE_CUDA_MPS=1", "FAKE_CUDA_PERSISTENCE=0", "CUDA_LAUNCH_BLOCKING=1",
                                      "CUDA_MODULE_LOADING=LAZY", "CUDA_DEVICE_MAX_CONNECTIONS=1"});
  EXPECT_THAT(status.plain, HasSubstr("MPS on, persistence mode off"));
  const std::vector<std::pair<const char*, const char*>> traps = {
      {"cuda:0, cuda:1: MPS is on", "keep it off where several owners share a GPU"},
      {"cuda:0, cuda:1: persistence mode is off", "nvidia-smi -pm 1"},
      {"got CUDA_LAUNCH_BLOCKING=1, want none", "unset it"},
      {"got CUDA_DEVICE_MAX_CONNECTIONS=1, want none, or 8 to 32", "unset it"},
      {"got CUDA_MODULE_LOADING=LAZY, want none, or EAGER", "unset it"},
  };
  for (const auto& [trap, remedy] : traps) {
    for (const std::string& text : {status.log, status.plain, status.json}) {
      EXPECT_THAT(text, ContainsRegex(absl::StrCat(trap, "[^\n]*", remedy)));
    }
  }
  // Under MPS the one process is its server, and without MPS no trainer would get in.
  EXPECT_THAT(StatusOf({"FAKE_CUDA_COMPUTE_MODE=3"}).plain, HasSubstr("no trainer can use the GPU beside the daemon"));
  EXPECT_THAT(StatusOf({"FAKE_CUDA_COMPUTE_MODE=3", "FAKE_CUDA_MPS=1"}).plain, Not(HasSubstr("no trainer can use")));
}

TEST(CudaDaemonTest, AnUnreadableSettingIsUnknownAndNoWarning) {
  const StatusText status = StatusOf({"FAKE_CUDA_MPS=unknown", "FAKE_CUDA_PERSISTENCE=unknown",
                                      "CUDA_LAUNCH_BLOCKING=0", "CUDA_DEVICE_MAX_CONNECTIONS=32"});
  EXPECT_THAT(status.plain, HasSubstr("MPS unknown: this driver does not say"));
  EXPECT_THAT(status.plain,
              HasSubstr("persistence mode unknown: load \"libnvidia-ml.so.1\": nvmlInit: Driver Not Loaded"));
  EXPECT_THAT(status.log, Not(HasSubstr(kWarns)));
  EXPECT_THAT(status.plain, Not(HasSubstr("warning")));
}

}  // namespace
}  // namespace shardd
