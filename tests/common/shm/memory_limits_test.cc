#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/shm/slab.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempDir;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// A machine with 8 GiB available; each test adds the cgroup files of some kind of container.
class MemoryLimitsTest : public ::testing::Test {
 protected:
  MemoryLimitsTest() {
    root_.Write("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n");
  }
  void Cgroup(const std::string& lines) { root_.Write("proc/self/cgroup", lines); }
  void V2(const std::string& folder, const std::string& max, int64_t current, int64_t inactive_file = 0) {
    const std::string base = "sys/fs/cgroup" + folder + "/";
    root_.Write(base + "memory.max", max + "\n");
    root_.Write(base + "memory.current", absl::StrCat(current, "\n"));
    root_.Write(base + "memory.stat", absl::StrCat("anon 1\ninactive_file ", inactive_file, "\nactive_file 2\n"));
  }
  void V1(const std::string& folder, const std::string& limit, int64_t usage, int64_t inactive_file = 0) {
    const std::string base = "sys/fs/cgroup/memory" + folder + "/";
    root_.Write(base + "memory.limit_in_bytes", limit + "\n");
    root_.Write(base + "memory.usage_in_bytes", absl::StrCat(usage, "\n"));
    root_.Write(base + "memory.stat", absl::StrCat("inactive_file 5\ntotal_inactive_file ", inactive_file, "\n"));
  }
  MemoryLimits Read() {
    const auto limits = GetMemoryLimits(root_.path());
    EXPECT_TRUE(limits.ok()) << limits.status();
    return *limits;
  }
  TempDir root_;
};

TEST_F(MemoryLimitsTest, WithoutCgroupsMemAvailableCounts) {
  EXPECT_EQ(Read().free_bytes, 8 * kGiB);
  EXPECT_EQ(Read().limited_by, "MemAvailable");
}

TEST_F(MemoryLimitsTest, V2LimitLessUseCounts) {
  Cgroup("0::/system.slice/shardd.service\n");
  V2("/system.slice/shardd.service", absl::StrCat(2 * kGiB), kGiB);
  EXPECT_EQ(Read().free_bytes, kGiB);
  EXPECT_EQ(Read().limited_by, "cgroup memory.max");
  EXPECT_TRUE(Read().of_own_cgroup);
}

TEST_F(MemoryLimitsTest, V2WithoutALimitIsMax) {
  Cgroup("0::/a\n");
  V2("/a", "max", kGiB);
  EXPECT_EQ(Read().free_bytes, 8 * kGiB);
  EXPECT_EQ(Read().limited_by, "MemAvailable");
}

TEST_F(MemoryLimitsTest, TightestAncestorCounts) {
  Cgroup("0::/kubepods/pod1/container\n");
  V2("/kubepods/pod1/container", absl::StrCat(4 * kGiB), kGiB);
  V2("/kubepods/pod1", absl::StrCat(3 * kGiB), 2 * kGiB + kGiB / 2);
  V2("/kubepods", "max", 9 * kGiB);
  EXPECT_EQ(Read().free_bytes, kGiB / 2);
  EXPECT_FALSE(Read().of_own_cgroup) << "what others of the pod use is in it";
}

TEST_F(MemoryLimitsTest, FilePagesThatTheKernelGivesUpAreFree) {
  Cgroup("0::/a\n");
  V2("/a", absl::StrCat(2 * kGiB), 2 * kGiB - kMiB, /*inactive_file=*/kGiB);
  EXPECT_EQ(Read().free_bytes, kGiB + kMiB);
  V2("/a", absl::StrCat(2 * kGiB), kMiB, /*inactive_file=*/kGiB);  // counted at another moment than the use
  EXPECT_EQ(Read().free_bytes, 2 * kGiB);
}

TEST_F(MemoryLimitsTest, UseBeyondTheLimitIsZeroAndNotNegative) {
  Cgroup("0::/a\n");
  V2("/a", absl::StrCat(kGiB), 2 * kGiB);
  EXPECT_EQ(Read().free_bytes, 0);
}

TEST_F(MemoryLimitsTest, V1LimitCounts) {
  Cgroup("9:name=systemd:/\n4:memory:/docker/abc\n3:cpuset:/\n");
  V1("/docker/abc", absl::StrCat(2 * kGiB), kGiB, /*inactive_file=*/kMiB);
  EXPECT_EQ(Read().free_bytes, kGiB + kMiB);
  EXPECT_EQ(Read().limited_by, "cgroup memory.limit_in_bytes");
}

TEST_F(MemoryLimitsTest, V1WithoutALimitIsAHugeNumber) {
  Cgroup("4:memory:/\n");
  V1("", "9223372036854771712", kGiB);
  EXPECT_EQ(Read().free_bytes, 8 * kGiB);
}

TEST_F(MemoryLimitsTest, V1ControllerMayShareItsHierarchy) {
  Cgroup("4:cpu,memory,blkio:/x\n");
  V1("/x", absl::StrCat(kGiB), 0);
  EXPECT_EQ(Read().free_bytes, kGiB);
}

TEST_F(MemoryLimitsTest, AnUnmountedCgroupPathFallsBackToTheMount) {
  Cgroup("4:memory:/docker/8c1f\n");
  V1("", absl::StrCat(kGiB), kMiB);
  EXPECT_EQ(Read().free_bytes, kGiB - kMiB);
}

TEST_F(MemoryLimitsTest, HybridHierarchyIsRead) {
  Cgroup("4:memory:/a\n0::/b\n");
  V1("/a", absl::StrCat(3 * kGiB), 0);
  V2("/unified/b", absl::StrCat(kGiB), 0);
  EXPECT_EQ(Read().free_bytes, kGiB);
  EXPECT_EQ(Read().limited_by, "cgroup memory.max");
}

TEST_F(MemoryLimitsTest, GarbageInCgroupFilesIsNoLimit) {
  Cgroup("nonsense\n0::/a\n::\n\n");
  V2("/a", "12 monkeys", kGiB);
  EXPECT_EQ(Read().free_bytes, 8 * kGiB);
}

TEST_F(MemoryLimitsTest, MissingFilesAreErrorsThatNameThem) {
  const TempDir empty;
  EXPECT_THAT(GetMemoryLimits(empty.path()).status().message(), HasSubstr("MemAvailable"));
}

TEST_F(MemoryLimitsTest, ThisMachineHasLimits) {
  const auto limits = GetMemoryLimits();
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_GT(limits->free_bytes, 0);
  EXPECT_FALSE(limits->limited_by.empty());
}

MemoryLimits Limits(int64_t free_bytes) { return {.free_bytes = free_bytes, .limited_by = "cgroup memory.max"}; }

TEST(CheckMemoryTest, WhatFitsToTheLastByteIsAccepted) {
  EXPECT_TRUE(CheckMemory(Limits(kGiB), kGiB).ok());
  EXPECT_TRUE(CheckMemory(Limits(0), 0).ok());
}

TEST(CheckMemoryTest, RefusalsNameBothSizesAndTheRemedy) {
  const absl::Status status = CheckMemory(Limits(kGiB), kGiB + 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("cgroup memory.max"));
  EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("got ", kGiB, " bytes free, want ", kGiB + 1, " bytes")));
  EXPECT_THAT(status.message(), HasSubstr("raise the memory limit"));
}

TEST(CheckMemoryTest, HostileSizesAreRefused) {
  EXPECT_EQ(CheckMemory(Limits(INT64_MAX), -1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckMemory(Limits(INT64_MAX), INT64_MIN).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardd
