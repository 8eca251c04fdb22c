// Quotas, and a machine that is full.

#include <sys/mount.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/faults/bad_input.h"

namespace shardd::faults {
namespace {

using e2e::TrainerReport;

TEST_F(BadInput, TheQuotaOfJobsIsKept) {
  StartDaemon({"--max_jobs_per_uid=1"});
  RawClient client(socket());
  ASSERT_TRUE(client.Open(SpecOf({{"name", "first"}})).ok());
  ExpectStatus(client.Open(SpecOf({{"name", "second"}})).status(), absl::StatusCode::kResourceExhausted,
               "--max_jobs_per_uid");
  EXPECT_TRUE(client.Open(SpecOf({{"name", "first"}})).ok());  // joining is not opening
}

TEST_F(BadInput, TheQuotaOfBytesIsKept) {
  StartDaemon({"--max_bytes_per_uid=6000000"});
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}});
  SetShape(large, {2'000'000});
  ExpectStatus(client.Open(large).status(), absl::StatusCode::kResourceExhausted, "--max_bytes_per_uid");
  ExpectServesOthers();
}

// A file system of its own as the state directory; away with the test.
class SmallTmpfs {
 public:
  explicit SmallTmpfs(const std::string& path) : path_(path) {
    mkdir(path.c_str(), 0700);
    mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, "size=12m,mode=0700") == 0;
  }
  ~SmallTmpfs() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

 private:
  const std::string path_;
  bool mounted_ = false;
};

TEST_F(BadInput, AFullTmpfsRefusesTheJobThatDoesNotFit) {
  const SmallTmpfs tmpfs(File("small"));
  if (!tmpfs.mounted()) {
    GTEST_SKIP() << "mounting a tmpfs needs privileges that this run does not have: " << std::strerror(errno);
  }
  StartDaemon({"--state_dir=" + File("small")});
  ExpectAllOk(RunRanks(job_.With({{"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}})));
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}});
  SetShape(large, {4 << 20});
  const absl::Status status = client.Open(large).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "large");
  // Small ones until there is no room, also not for a journal.
  absl::Status last;
  for (int i = 0; i < 64 && last.ok(); ++i) {
    last = client.Open(SpecOf({{"name", absl::StrCat("filler", i)}})).status();
  }
  EXPECT_EQ(last.code(), absl::StatusCode::kResourceExhausted) << last;
  const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 5");
  EXPECT_TRUE(DaemonAlive());
}

}  // namespace
}  // namespace shardd::faults
