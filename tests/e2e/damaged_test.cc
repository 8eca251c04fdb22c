// One byte of what a dead daemon has left of a job is another one: the next daemon names that job and goes on with the
// others, and the custodian still has its memory; or what is damaged is not needed.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/daemon_death.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;

constexpr int kSteps = 5;
constexpr char kDamaged[] = "damaged";
// Which step is committed follows from the journal where nobody has looked at full parameters.
const Args kTrained = {{"name", kDamaged}, {"read_values", "0"}, {"pause", "end@5"}};

// What a custodian has in a memfd, as this process may change it.
class Kept {
 public:
  explicit Kept(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    EXPECT_GE(fd_, 0);
    struct stat object {};
    EXPECT_EQ(fstat(fd_, &object), 0);
    bytes_.resize(static_cast<size_t>(object.st_size));
    EXPECT_EQ(pread(fd_, bytes_.data(), bytes_.size(), 0), object.st_size);
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { close(fd_); }
  template <typename T>
  T At(size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(value));
    return value;
  }
  size_t size_bytes() const { return bytes_.size(); }
  size_t LastThatIsNotZero() const { return bytes_.find_last_not_of('\0'); }
  void Flip(size_t offset) {
    const char flipped = static_cast<char>(bytes_[offset] ^ 0x10);
    EXPECT_EQ(pwrite(fd_, &flipped, 1, static_cast<off_t>(offset)), 1);
  }
  // Of a take-up log (server/storage/take_up_log.h): which of its two headers counts.
  size_t LastHeader() const { return At<uint64_t>(8) > At<uint64_t>(64 + 8) ? 0 : 64; }

 private:
  const int fd_;
  std::string bytes_;
};

class Damaged : public DaemonDeath {
 protected:
  using Held = std::map<ino_t, std::string>;  // by inode: the path by which this process opens it
  Held HeldByCustodian() const {
    Held held;
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", custodian_->pid(), "/fd"))) {
      struct stat object {};
      if (absl::StartsWith(NameOf(entry.path()), "/memfd:") && stat(entry.path().c_str(), &object) == 0) {
        held[object.st_ino] = entry.path();
      }
    }
    return held;
  }
  static std::string NameOf(const std::string& path) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(path, error);
    return target.substr(0, target.find(" (deleted)"));
  }
  static std::string Find(const Held& held, const std::string& name) {
    for (const auto& [inode, path] : held) {
      if (absl::EndsWith(NameOf(path), "shardd-" + name)) return path;
    }
    return "";
  }
  // Ranks of a job that will be damaged have trained and wait, and it alone is there.
  void TrainOne() {
    StartCustodian();
    StartKept();
    const Held before = HeldByCustodian();
    its_ranks_ = StartRanks(Training(kSteps).With(kTrained));
    for (int rank = 0; rank < 2; ++rank) AwaitPause(kTrained, "end", rank);
    its_ = HeldByCustodian();
    for (const auto& [inode, path] : before) its_.erase(inode);
  }
  // The next daemon takes up another job, not this one, and says so.
  void ExpectNamedAndKept(const std::string& why) {
    const std::string log = testing::ReadWholeFile(DaemonLog());
    EXPECT_TRUE(absl::StrContains(log, "of the daemon before is not taken up, and its memory is freed after 15m"))
        << log;
    EXPECT_TRUE(absl::StrContains(log, why)) << log;
    const Held held = HeldByCustodian();
    for (const auto& [inode, path] : its_) EXPECT_TRUE(held.contains(inode)) << NameOf(path);
  }

  // What a new job of its name says that there was.
  std::string LostToWhoeverComes() {
    const Args args = Training(1).With(kTrained).With({{"pause", "end@1"}});
    std::vector<Child> ranks = StartRanks(args);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
    for (Child& rank : ranks) rank.Kill(SIGKILL);
    return Job(kDamaged).lost().text();
  }

  std::vector<Child> its_ranks_;
  Held its_;
};

struct Damage {
  const char* name;
  const char* memory;
  size_t (*offset)(const Kept& memory);
  const char* why;
  bool is_known;  // whose it is
};

class DamagedMemory : public Damaged, public ::testing::WithParamInterface<Damage> {};

TEST_P(DamagedMemory, IsNamedAndKeptWhileOtherJobsGoOn) {
  TrainOne();
  const Args other = Training(400);
  std::vector<Child> others = StartRanks(other);
  ASSERT_TRUE(testing::PollUntil([this] { return Committed() >= 5; }));
  KillDaemon();
  {
    Kept memory(Find(its_, GetParam().memory));
    memory.Flip(GetParam().offset(memory));
  }
  StartKept();
  for (Child& rank : its_ranks_) rank.Kill(SIGKILL);
  ExpectUndisturbed(other, others);
  ExpectNamedAndKept(GetParam().why);
  const std::string lost = LostToWhoeverComes();
  if (GetParam().is_known) {
    EXPECT_TRUE(absl::StrContains(lost, "could not go on with it")) << lost;
    EXPECT_TRUE(absl::StrContains(lost, GetParam().why)) << lost;
  } else {
    EXPECT_EQ(lost, "") << "nobody knows its name";
  }
}

// Of the place that has the record of the last step, the second one.
size_t InLastRecord(const Kept& journal) { return journal.LastThatIsNotZero(); }
size_t InDescription(const Kept& /*job*/) { return 12; }

INSTANTIATE_TEST_SUITE_P(Bytes, DamagedMemory,
                         ::testing::Values(Damage{"InItsJournal", "journal", InLastRecord,
                                                  "\"damaged\": journal: no record of step 5", true},
                                           Damage{"InItsDescription", "job", InDescription, "\"job\" is not valid",
                                                  false}),
                         [](const auto& info) { return std::string(info.param.name); });

// The one before it, and the journal, say as much.
TEST_F(Damaged, TheLastHeaderOfALogIsNotNeeded) {
  TrainOne();
  KillDaemon();
  {
    Kept log(Find(its_, "take-up log"));
    log.Flip(log.LastHeader() + 24);  // its step
  }
  StartKept();
  EXPECT_EQ(Job(kDamaged).committed_step(), kSteps);
  for (Child& rank : its_ranks_) {
    rank.Kill(SIGKILL);
    rank.Wait();
  }
  const Args args = Training(kSteps).With({{"name", kDamaged}});
  std::vector<Child> ranks = StartRanks(args);
  ExpectUndisturbed(args, ranks);
}

// A step whose update has begun was decided: shards are not taken for those of the step before.
TEST_F(Damaged, RecordOfAnUpdateThatHadBegunIsMissed) {
  const Args args = Training(4000).With({{"name", kDamaged}});
  StartCustodian();
  StartKept();
  const Held before = HeldByCustodian();
  its_ranks_ = StartRanks(args);
  ASSERT_TRUE(testing::PollUntil([this] { return Job(kDamaged).committed_step() >= 2; }));
  KillDaemon();
  its_ = HeldByCustodian();
  for (const auto& [inode, path] : before) its_.erase(inode);
  bool torn = false;
  for (int nth = 20; !torn; ++nth) {
    ASSERT_LT(nth, 120);
    ASSERT_NO_FATAL_FAILURE(DieAtWrite(nth));
    const Kept log(Find(HeldByCustodian(), "take-up log"));
    const auto step = log.At<int64_t>(log.LastHeader() + 24);
    constexpr size_t kUpdateOfRank0 = 4096;
    torn = log.At<int64_t>(kUpdateOfRank0) == step + 1;
    if (!torn) continue;
    Kept journal(Find(HeldByCustodian(), "journal"));
    // Records begin at 64, and behind the first place's pages.
    journal.Flip((step + 1) % 2 == 0 ? 64 + 12 : journal.LastThatIsNotZero());
  }
  StartKept();
  for (Child& rank : its_ranks_) rank.Kill(SIGKILL);
  ExpectNamedAndKept("whose update had begun");
}

}  // namespace
}  // namespace shardd::e2e
