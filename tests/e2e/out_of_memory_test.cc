// The kernel kills the daemon because its memory cgroup is full. Pages of jobs stay charged there, and with the
// custodian: the next daemon goes on with them.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// Below this process's own. Whoever is left in it goes back there with its end.
class MemoryCgroup {
 public:
  MemoryCgroup() {
    for (const absl::string_view line : absl::StrSplit(testing::ReadWholeFile("/proc/self/cgroup"), '\n')) {
      const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (fields.size() != 3 || (fields[1] != "memory" && fields[1] != "")) continue;
      v2_ = fields[1].empty();
      own_ = absl::StrCat("/sys/fs/cgroup", v2_ ? "" : "/memory", fields[2]);
      if (!v2_) break;
    }
    path_ = absl::StrCat(own_, "/shardd-test-", getpid());
    std::error_code error;
    if (own_.empty() || !std::filesystem::create_directory(path_, error)) {
      why_not_ = absl::StrCat("no memory cgroup can be made in \"", own_, "\": ", error.message());
    } else if (access(Limit().c_str(), W_OK) != 0) {
      why_not_ = absl::StrCat("\"", path_, "\" has no memory controller");
    }
  }
  ~MemoryCgroup() {
    for (const absl::string_view pid :
         absl::StrSplit(testing::ReadWholeFile(absl::StrCat(path_, "/cgroup.procs")), '\n', absl::SkipEmpty())) {
      Write(absl::StrCat(own_, "/cgroup.procs"), std::string(pid));
    }
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  const std::string& why_not() const { return why_not_; }
  void Add(pid_t pid) const { Write(absl::StrCat(path_, "/cgroup.procs"), absl::StrCat(pid)); }
  int64_t used_bytes() const {
    const std::string file = absl::StrCat(path_, v2_ ? "/memory.current" : "/memory.usage_in_bytes");
    int64_t bytes = 0;
    EXPECT_TRUE(absl::SimpleAtoi(absl::StripSuffix(testing::ReadWholeFile(file), "\n"), &bytes)) << file;
    return bytes;
  }
  void SetLimit(int64_t bytes) const { Write(Limit(), absl::StrCat(bytes)); }

 private:
  std::string Limit() const { return absl::StrCat(path_, v2_ ? "/memory.max" : "/memory.limit_in_bytes"); }
  static void Write(const std::string& file, const std::string& text) {
    std::ofstream out(file);
    out << text << std::flush;
    EXPECT_TRUE(out.good()) << file << ": " << text;
  }
  bool v2_ = false;
  std::string own_, path_, why_not_;
};

class OutOfMemory : public KeptCluster {};

TEST_F(OutOfMemory, AKillOfTheDaemonLosesNothing) {
  constexpr int64_t kRoomBytes = int64_t{16} << 20;
  MemoryCgroup cgroup;
  if (!cgroup.why_not().empty()) GTEST_SKIP() << cgroup.why_not();
  StartCustodian();
  StartKept();
  cgroup.Add(daemon_pid());
  const Args args = Training(300);
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(PollUntil([this] { return Committed() >= 5; }));
  const int64_t before = Committed();
  std::ofstream(absl::StrCat("/proc/", daemon_pid(), "/oom_score_adj")) << 1000 << std::flush;  // it, and not the other
  cgroup.SetLimit(cgroup.used_bytes() + kRoomBytes);
  Child other([&cgroup] {
    cgroup.Add(getpid());
    void* const memory =
        mmap(nullptr, 4 * kRoomBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? 1 : 0;
  });
  WaitForDaemon();
  other.Wait();  // it may be killed, too
  StartKept();
  EXPECT_GE(Committed(), before);
  ExpectUndisturbed(args, ranks);
}

}  // namespace
}  // namespace shardd::e2e
