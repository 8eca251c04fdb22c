#include "common/secret/job_secret.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSecret[] = "0123456789abcdef";

class JobSecretFile : public ::testing::Test {
 protected:
  std::string Write(const std::string& contents, mode_t mode = 0600) {
    const std::string path = folder_.File("secret");
    std::ofstream(path, std::ios::binary) << contents;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  static void ExpectRefused(const std::string& path, absl::StatusCode code, const std::string& text) {
    const absl::Status status = ReadJobSecretFile(path).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr(text), Not(HasSubstr(kSecret))));
  }
  testing::TempDir folder_;
};

TEST_F(JobSecretFile, IsReadWithoutTheNewlineAtItsEnd) {
  EXPECT_EQ(*ReadJobSecretFile(Write(kSecret)), kSecret);
  EXPECT_EQ(*ReadJobSecretFile(Write(std::string(kSecret) + "\n", 0400)), kSecret);
  EXPECT_EQ(*ReadJobSecretFile(Write(std::string(kSecret) + "\n\n")), std::string(kSecret) + "\n");
  const std::string bytes("\0\x01\xff 0123456789abc", 16);
  EXPECT_EQ(*ReadJobSecretFile(Write(bytes)), bytes);
}

TEST_F(JobSecretFile, IsFoundBehindALinkAsKubernetesMountsIt) {
  const std::string link = folder_.File("link");
  ASSERT_EQ(symlink(Write(kSecret).c_str(), link.c_str()), 0);
  EXPECT_EQ(*ReadJobSecretFile(link), kSecret);
}

TEST_F(JobSecretFile, OfARangeOfLengths) {
  EXPECT_EQ(ReadJobSecretFile(Write(std::string(64, 'x') + "\n"))->size(), 64u);
  for (const char* bad : {"", "\n", "fifteen bytes."}) {
    ExpectRefused(Write(bad), absl::StatusCode::kInvalidArgument, "want 16 to 64");
  }
  ExpectRefused(Write(std::string(65, 'x')), absl::StatusCode::kInvalidArgument, "want 16 to 64");
  ExpectRefused(Write(std::string(1 << 20, 'x')), absl::StatusCode::kInvalidArgument, "want 16 to 64");
}

TEST_F(JobSecretFile, ThatOthersMayReadOrChangeIsRefused) {
  for (const mode_t mode : {0604, 0606, 0602, 0620, 0644}) {
    ExpectRefused(Write(kSecret, mode), absl::StatusCode::kPermissionDenied, "others may read or change it");
  }
}

TEST_F(JobSecretFile, OfRootMayBeReadByItsGroup) {
  if (geteuid() != 0) GTEST_SKIP() << "a file of root's needs root (uid " << geteuid() << ")";
  EXPECT_EQ(*ReadJobSecretFile(Write(kSecret, 0440)), kSecret);
  EXPECT_EQ(*ReadJobSecretFile(Write(kSecret, 0640)), kSecret);
}

TEST_F(JobSecretFile, OfAUserIsForNoGroup) {
  if (geteuid() != 0) {
    ExpectRefused(Write(kSecret, 0640), absl::StatusCode::kPermissionDenied, "got mode 0640, want 0600 at most");
    return;
  }
  const std::string path = Write(kSecret, 0600);
  ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
  ExpectRefused(path, absl::StatusCode::kPermissionDenied, "another user (got uid 12345, want 0, or 0)");
}

TEST_F(JobSecretFile, IsAFile) {
  ExpectRefused(folder_.path(), absl::StatusCode::kInvalidArgument, "no regular file");
  ExpectRefused(folder_.File("none"), absl::StatusCode::kNotFound, "No such file");
  const std::string pipe = folder_.File("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  ExpectRefused(pipe, absl::StatusCode::kInvalidArgument, "no regular file");
}

TEST_F(JobSecretFile, YieldsToTheValue) {
  const std::string path = Write(kSecret);
  setenv("SHARDD_JOB_SECRET", "another secret of mine", 1);
  setenv("SHARDD_JOB_SECRET_FILE", path.c_str(), 1);
  EXPECT_EQ(*ReadJobSecret(), "another secret of mine");
  setenv("SHARDD_JOB_SECRET", "too short", 1);
  const absl::Status status = ReadJobSecret().status();
  setenv("SHARDD_JOB_SECRET", "", 1);
  EXPECT_EQ(*ReadJobSecret(), kSecret);
  unsetenv("SHARDD_JOB_SECRET");
  EXPECT_EQ(*ReadJobSecret(), kSecret);
  setenv("SHARDD_JOB_SECRET_FILE", "", 1);
  EXPECT_EQ(*ReadJobSecret(), "");
  unsetenv("SHARDD_JOB_SECRET_FILE");
  EXPECT_EQ(*ReadJobSecret(), "");
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("SHARDD_JOB_SECRET"), Not(HasSubstr("too short"))));
}

}  // namespace
}  // namespace shardd
