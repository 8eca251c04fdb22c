#include "server/collective/nccl/trial.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/server/collective/nccl/fake_nccl_world.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

constexpr char kThisMachine[] = "two GPUs, NCCL 2.28.9";

TEST(TrialFileTest, KeepsTheTimesOfOneMachine) {
  const ::shardd::testing::TempDir folder;
  const std::string path = folder.File("trial");
  EXPECT_FALSE(ReadTrial(path, kThisMachine).ok());
  WriteTrial(path, kThisMachine, TrialTimes{absl::Nanoseconds(1234567), absl::Microseconds(5)});
  const absl::StatusOr<TrialTimes> read = ReadTrial(path, kThisMachine);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->copies, absl::Nanoseconds(1234567));
  EXPECT_EQ(read->nccl, absl::Microseconds(5));
  EXPECT_FALSE(ReadTrial(path, "two GPUs, NCCL 2.29.0").ok());
  WriteTrial(path, "another", TrialTimes{absl::Seconds(1), absl::Seconds(1)});  // as a whole
  EXPECT_FALSE(ReadTrial(path, kThisMachine).ok());
  EXPECT_TRUE(ReadTrial(path, "another").ok());
}

TEST(TrialFileTest, WhatIsDamagedOrALinkIsNotRead) {
  const ::shardd::testing::TempDir folder;
  const std::string path = folder.File("trial");
  for (const char* rest : {"\n", "\n1\n", "\n1 2 3\n", "\n0 5\n", "\n-4 5\n", "\nx 5\n", "\n5 x\n", "\n5 6", ""}) {
    std::ofstream(path) << kThisMachine << rest;
    EXPECT_TRUE(absl::IsNotFound(ReadTrial(path, kThisMachine).status())) << rest;
    EXPECT_TRUE(absl::IsNotFound(ReadTrial(path, "").status())) << rest;
  }
  std::ofstream(path) << kThisMachine << "\n5 6\n";
  EXPECT_TRUE(ReadTrial(path, kThisMachine).ok());
  EXPECT_TRUE(ReadTrial(path, "").ok());
  const std::string link = folder.File("link");
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  EXPECT_FALSE(ReadTrial(link, kThisMachine).ok());
  const std::string pipe = folder.File("pipe");  // nobody writes to it
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(ReadTrial(pipe, kThisMachine).ok());
}

TEST(TrialFileTest, KeepsWhatWentWrong) {
  const ::shardd::testing::TempDir folder;
  const std::string path = folder.File("trial");
  WriteTrial(path, kThisMachine, absl::DeadlineExceededError("a sum\ntook long"));
  const absl::Status read = ReadTrial(path, kThisMachine).status();
  EXPECT_EQ(read, absl::FailedPreconditionError("a sum took long"));
  EXPECT_TRUE(absl::IsNotFound(ReadTrial(path, "another").status()));
}

// A process of the same number, as in another container of the same folder, was killed as it wrote.
TEST(TrialFileTest, ADraftLeftBehindIsReplaced) {
  const ::shardd::testing::TempDir folder;
  const std::string path = folder.File("trial");
  std::ofstream(absl::StrCat(path, ".", getpid())) << "half";
  WriteTrial(path, kThisMachine, TrialTimes{absl::Seconds(1), absl::Seconds(2)});
  EXPECT_TRUE(ReadTrial(path, kThisMachine).ok());
}

TEST(TrialTest, NcclHasToBeATenthFaster) {
  EXPECT_TRUE(ChooseByTimes({absl::Microseconds(100), absl::Microseconds(90)}, false).nccl);
  const CollectiveChoice copies = ChooseByTimes({absl::Microseconds(100), absl::Microseconds(91)}, true);
  EXPECT_FALSE(copies.nccl);
  EXPECT_EQ(copies.reason,
            "NCCL took 91 us for a sum of 32 MiB on each GPU, the GPUs' own copies 100 us, and it has to be a tenth "
            "faster (measured by an earlier start)");
}

// Both ways, on three GPUs, which the bytes do not divide by; nothing of it is left.
TEST(TrialTest, SumsByBothCollectives) {
  FakeCudaWorld gpus(/*delay_seed=*/0, /*gpus=*/3, /*queue_limit=*/1024);
  std::vector<std::unique_ptr<Device>> made = gpus.MakeAll();
  std::vector<Device*> devices;
  for (const auto& device : made) devices.push_back(device.get());
  for (const bool window : {false, true}) {
    NcclCommunicator::Options options;
    options.takes_window = window;
    auto communicator =
        NcclCommunicator::Create(NcclLibrary(fake_nccl::Table(), 22809), gpus.driver(), {0, 1, 2}, options);
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    const std::weak_ptr<NcclCommunicator> end = *communicator;
    const absl::StatusOr<TrialTimes> times = TryCollectives(devices, *std::move(communicator), absl::Seconds(60));
    ASSERT_TRUE(times.ok()) << times.status();
    EXPECT_GT(times->copies, absl::ZeroDuration());
    EXPECT_GT(times->nccl, absl::ZeroDuration());
    AwaitEnd(end);
  }
}

}  // namespace
}  // namespace shardd
