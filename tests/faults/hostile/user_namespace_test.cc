// A trainer that is root of a user namespace, as in a container, of the daemon's uid or of another one. It has the
// descriptors of a session, all capabilities over what is mapped there, and the paths of the sockets.

#include "tests/testing/user_namespace.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/shm/session_view.h"
#include "server/custodian/wire.h"
#include "server/job/wait.h"
#include "tests/faults/bad_input.h"
#include "tests/testing/programs.h"
#include "tests/testing/run_as_uid.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace shardd::faults {
namespace {

constexpr uint32_t kStranger = 12345;
constexpr char kNoNamespace[] = "no namespace";

int64_t SizeOf(int fd) {
  struct stat object {};
  return fstat(fd, &object) == 0 ? int64_t{object.st_size} : -1;
}

bool MapsForWriting(int fd) {
  void* const data = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return false;
  munmap(data, kPageBytes);
  return true;
}

std::string ContentOf(int fd) {
  std::string content(static_cast<size_t>(SizeOf(fd)), '\0');
  EXPECT_EQ(pread(fd, content.data(), content.size(), 0), static_cast<ssize_t>(content.size()));
  return content;
}

// The attacker. Runs in a process of its own, and says what it could do and should not be able to, a line each.
class Attacker {
 public:
  // `is_owner`: of the daemon's uid, which may open anew what it was given to read.
  Attacker(const std::vector<UniqueFd>& fds, bool is_owner) : fds_(fds), is_owner_(is_owner) {}

  std::string Attack(const std::vector<pid_t>& victims, const std::vector<std::string>& custodies) {
    for (int which = 0; which < kSessionFdCount; ++which) {
      if (which != kFdDoorbell && fds_[which].valid()) AttackSlab(which);
    }
    for (const pid_t victim : victims) AttackProcess(victim);
    for (const std::string& path : custodies) AttackCustodian(path);
    return could_;
  }

 private:
  void Could(const std::string& what, bool it_could) {
    if (it_could) absl::StrAppend(&could_, what, "\n");
  }

  void AttackSlab(int which) {
    const int fd = fds_[which].get();
    const std::string name = absl::StrCat("slab ", which, ": ");
    const bool may_write = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
    AttackSize(name, fd);
    if (!may_write) AttackContent(name, fd);
    const std::string path = absl::StrCat("/proc/self/fd/", fd);
    for (const bool changes_mode : {false, true}) {
      if (changes_mode) Could(name + "change its mode", fchmod(fd, 0666) == 0 && !is_owner_);
      const UniqueFd again(open(path.c_str(), O_RDWR | O_CLOEXEC));
      Could(name + "open it anew for writing", again.valid() && !is_owner_);
      if (!again.valid()) continue;
      AttackSize(name + "opened anew: ", again.get());
      if (which == kFdDaemonPage) AttackContent(name + "opened anew: ", again.get());
    }
    Could(name + "truncate its path", truncate(path.c_str(), 0) == 0);
  }
  void AttackSize(const std::string& name, int fd) {
    const int64_t size_bytes = SizeOf(fd);
    Could(name + "empty", ftruncate(fd, 0) == 0);
    Could(name + "shrink", ftruncate(fd, size_bytes - kPageBytes) == 0);
    Could(name + "grow", ftruncate(fd, 2 * size_bytes) == 0);
    Could(name + "allocate behind its end", fallocate(fd, 0, size_bytes, kPageBytes) == 0);
    for (const int seal : {F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
      Could(absl::StrCat(name, "add seal ", seal), fcntl(fd, F_ADD_SEALS, seal) == 0);
    }
    Could(name + "change its size", SizeOf(fd) != size_bytes);
  }
  void AttackContent(const std::string& name, int fd) {
    Could(name + "write", pwrite(fd, "x", 1, 0) == 1);
    Could(name + "map for writing", MapsForWriting(fd));
    Could(name + "punch a hole", fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes) == 0);
    Could(name + "zero a range", fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes) == 0);
  }
  // What others map lies behind their processes.
  void AttackProcess(pid_t victim) {
    const std::string proc = absl::StrCat("/proc/", victim);
    for (int fd = 0; fd < 256; ++fd) {
      const std::string path = absl::StrCat(proc, "/fd/", fd);
      Could(path, UniqueFd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)).valid());
    }
    DIR* const maps = opendir((proc + "/map_files").c_str());
    for (const dirent* entry; maps != nullptr && (entry = readdir(maps)) != nullptr;) {
      const std::string path = absl::StrCat(proc, "/map_files/", entry->d_name);
      Could(path, entry->d_name[0] != '.' && UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC)).valid());
    }
    if (maps != nullptr) closedir(maps);
    Could(proc + "/mem", UniqueFd(open((proc + "/mem").c_str(), O_RDWR | O_CLOEXEC)).valid());
    Could(absl::StrCat("signal ", victim), !is_owner_ && kill(victim, 0) == 0);
  }
  void AttackCustodian(const std::string& path) {
    const UniqueFd raw(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    if (connect(raw.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return;
    for (const CustodyOp op : {CustodyOp::kOwn, CustodyOp::kList, CustodyOp::kDrop}) {
      CustodyMessage request;
      request.op = op;
      UniqueFd fd;
      if (!SendCustody(raw.get(), request, -1, absl::Seconds(5)).ok()) return;
      Could(absl::StrCat(path, ": be answered ", static_cast<int>(op)),
            ReceiveCustody(raw.get(), &fd, absl::Seconds(5)).ok());
    }
  }

  const std::vector<UniqueFd>& fds_;
  const bool is_owner_;
  std::string could_;
};

class RootOfAUserNamespace : public BadInput {
 protected:
  void StartCustodians() {
    for (const char* name : {"custody.sock", "without-daemon.sock"}) {
      custodies_.push_back(File(name));
      custodians_.push_back(testing::Spawn({testing::ProgramPath("shardd-custodian"), "--listen=unix:" + File(name)},
                                           {.log = File("custodian.log")}));
      ASSERT_TRUE(testing::PollUntil([&] { return access(File(name).c_str(), F_OK) == 0; }));
    }
    StartDaemonWithJob({"--custodian=unix:" + custodies_[0]});
    // As for a container that has the folder: modes keep nobody out.
    ASSERT_EQ(chmod(socket().substr(0, socket().rfind('/')).c_str(), 0711), 0);
    for (const std::string& path : {socket(), custodies_[0], custodies_[1]}) ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  }
  // What the attacker of this uid could do with a session of its own job.
  std::string AttackAs(uint32_t uid) {
    std::unique_ptr<RawClient> client;
    std::vector<UniqueFd> fds;
    const auto as_uid = [uid](const std::function<void()>& body) {
      uid == geteuid() ? body() : testing::RunAsUid(uid, body);
    };
    as_uid([&] { client = std::make_unique<RawClient>(socket(), ConnectTo(socket())); });
    const auto opened = client->Open(SpecOf({{"name", "its_own"}, {"world", "1"}, {"param_dtype", "bf16"}}));
    EXPECT_TRUE(opened.ok()) << opened.status();
    const auto session = client->Attach(opened->job_id(), 0);
    EXPECT_TRUE(session.ok()) << session.status();
    as_uid([&] { fds = *FetchSessionFds(socket(), session->session_id(), session->token(), testing::kLimit); });
    EXPECT_TRUE(fds[kFdShards].valid() && fds[kFdParameters].valid() && fds[kFdGradients].valid());
    std::vector<std::pair<int, std::string>> read_only;
    for (const int which : {kFdShards, kFdParameters, kFdDaemonPage}) {
      read_only.emplace_back(which, ContentOf(fds[which].get()));
    }
    const std::string could = InANamespace(uid, fds);
    for (const auto& [which, content] : read_only) {
      EXPECT_TRUE(which == kFdDaemonPage || ContentOf(fds[which].get()) == content) << "slab " << which;
    }
    EXPECT_TRUE(DaemonAlive());
    EXPECT_TRUE(RawClient(socket()).Close(opened->job_id()).ok());
    return could;
  }

 private:
  std::string InANamespace(uint32_t uid, const std::vector<UniqueFd>& fds) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd ours(ends[0]);
    UniqueFd theirs(ends[1]);
    const bool is_owner = uid == geteuid();
    testing::Child child([&] {
      if (!is_owner && (setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0)) return 1;
      const std::string could = testing::BecomeRootOfUserNamespace()
                                    ? Attacker(fds, is_owner).Attack({daemon_pid(), custodians_[0].pid()}, custodies_)
                                    : kNoNamespace;
      return write(theirs.get(), could.data(), could.size()) == static_cast<ssize_t>(could.size()) ? 0 : 1;
    });
    theirs.reset();
    std::string could;
    char bytes[4096];
    for (ssize_t got = 0; (got = read(ours.get(), bytes, sizeof(bytes))) > 0;) could.append(bytes, got);
    EXPECT_EQ(child.Wait(), 0);
    return could;
  }

  std::vector<std::string> custodies_;
  std::vector<testing::Child> custodians_;
};

TEST_F(RootOfAUserNamespace, OfTheDaemonsUidCannotResizeOrReachACustodian) {
  ASSERT_NO_FATAL_FAILURE(StartCustodians());
  const std::string could = AttackAs(geteuid());
  if (could == kNoNamespace)
    GTEST_SKIP() << "this user can have no user namespace of its own (uid " << geteuid() << ")";
  EXPECT_EQ(could, "");
  ExpectJobIntact();
}

TEST_F(RootOfAUserNamespace, OfAnotherUidCannotResizeWriteOrReachACustodian) {
  if (geteuid() != 0) GTEST_SKIP() << "being another user needs root (uid " << geteuid() << ")";
  ASSERT_NO_FATAL_FAILURE(StartCustodians());
  const std::string could = AttackAs(kStranger);
  if (could == kNoNamespace) GTEST_SKIP() << "another user can have no user namespace of its own";
  EXPECT_EQ(could, "");
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
