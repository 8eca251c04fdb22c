// The custodian as a process, its owners as others, and what becomes of descriptors when either is killed.

#include "server/custodian/custodian.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shm/slab.h"
#include "server/custodian/custody.h"
#include "server/job/wait.h"
#include "server/job/work/given_back.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"
#include "tests/testing/programs.h"
#include "tests/testing/run_as_uid.h"
#include "tests/testing/user_namespace.h"

namespace shardd {
namespace {

using testing::Child;
using ::testing::HasSubstr;
using testing::PollUntil;

class CustodianTest : public ::testing::Test {
 protected:
  CustodianTest() { Start(); }

  // `open_files`: its limit; 0: this process's.
  void Start(absl::Duration unowned = absl::Minutes(15), rlim_t open_files = 0) {
    custodian_ = std::make_unique<Child>([path = path_, unowned, open_files] {
      if (const rlimit files{open_files, open_files}; open_files > 0 && setrlimit(RLIMIT_NOFILE, &files) != 0) return 3;
      auto custodian = Custodian::Create({path, unowned});
      if (!custodian.ok()) return 2;
      const UniqueFd never(eventfd(0, EFD_CLOEXEC));
      (*custodian)->Run(never.get());
      return 0;
    });
    EXPECT_TRUE(PollUntil([this] { return access(path_.c_str(), F_OK) == 0 && Raw().valid(); }));
  }
  void EndCustodian() {
    custodian_->Kill(SIGKILL);
    EXPECT_EQ(custodian_->Wait(), 1000 + SIGKILL);
  }
  // A connection that has said nothing yet.
  UniqueFd Raw() const {
    UniqueFd raw(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    if (connect(raw.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) raw.reset();
    return raw;
  }
  static CustodyMessage Ask(const UniqueFd& raw, const CustodyMessage& request, int fd = -1) {
    EXPECT_TRUE(SendCustody(raw.get(), request, fd, absl::Seconds(5)).ok());
    UniqueFd none;
    auto answer = ReceiveCustody(raw.get(), &none, absl::Seconds(5));
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? *answer : CustodyMessage();
  }
  // A process that owns what is kept and has put `text` there as (7, "shards"); alive until it is killed.
  std::unique_ptr<Child> Owner(const std::string& text) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    auto owner = std::make_unique<Child>([this, text, ready] {
      auto custody = Custody::Connect(path_, absl::Seconds(5));
      if (!custody.ok()) return 2;
      auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
      std::strcpy((*slab)->At<char>(0), text.c_str());
      if (!(*custody)->Put(7, "shards", (*slab)->fd()).ok()) return 3;
      (void)!write(ready[1], "x", 1);
      for (;;) pause();
    });
    close(ready[1]);
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1) << "the owner has ended";
    close(ready[0]);
    return owner;
  }
  // Descriptors of memory that the custodian has.
  int Held() const {
    int held = 0;
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", custodian_->pid(), "/fd"))) {
      std::error_code gone;
      held += absl::StrContains(std::filesystem::read_symlink(entry.path(), gone).string(), "memfd:") ? 1 : 0;
    }
    return held;
  }
  static std::string TextOf(Custody::Objects& objects, uint64_t job = 7, const std::string& name = "shards") {
    auto slab = Slab::TakeUp(name, std::move(objects[{job, name}]), 4096);
    return slab.ok() ? std::string((*slab)->At<char>(0)) : slab.status().ToString();
  }

  testing::TempDir folder_;
  const std::string path_ = folder_.File("custody.sock");
  std::unique_ptr<Child> custodian_;
};

TEST_F(CustodianTest, MemoryOfAKilledOwnerIsTheNextOnes) {
  Owner("of the first")->Kill(SIGKILL);
  auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  Custody::Objects objects = (*next)->TakeUp();
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(TextOf(objects), "of the first");
}

// A daemon of the next version, to a custodian that runs on; and one from before there were ranges.
TEST_F(CustodianTest, SpeaksTheNewestVersionThatItsOwnerSpeaksToo) {
  const UniqueFd next = Raw();
  CustodyMessage own;
  own.op = CustodyOp::kOwn;
  own.version = static_cast<uint16_t>(kCustodyVersions.oldest);
  own.newest = static_cast<uint32_t>(kCustodyVersions.newest) + 5;
  EXPECT_EQ(Ask(next, own).newest, static_cast<uint32_t>(kCustodyVersions.newest));
  own.newest = 0;
  const CustodyMessage answer = Ask(next, own);
  EXPECT_EQ(answer.code, 0);
  EXPECT_EQ(answer.version, own.version);
  EXPECT_EQ(answer.newest, own.version);
}

TEST_F(CustodianTest, AnOwnerOfOtherVersionsIsToldSo) {
  const UniqueFd later = Raw();
  CustodyMessage own;
  own.op = CustodyOp::kOwn;
  own.version = static_cast<uint16_t>(kCustodyVersions.newest + 1);
  own.newest = own.version + 1u;
  const CustodyMessage answer = Ask(later, own);
  EXPECT_EQ(answer.code, static_cast<int>(absl::StatusCode::kUnimplemented));
  EXPECT_EQ(answer.version, own.version) << "what it does not read it cannot show";
  EXPECT_THAT(answer.text, HasSubstr(absl::StrCat("want ", kCustodyVersions.Text(), "); upgrade this custodian")));
  EXPECT_TRUE(Custody::Connect(path_, absl::Seconds(5)).ok()) << "it owns nothing";
}

TEST_F(CustodianTest, ARequestOfAnotherVersionThanAgreedIsRefused) {
  const UniqueFd raw = Raw();
  CustodyMessage message;
  message.op = CustodyOp::kOwn;
  ASSERT_EQ(Ask(raw, message).code, 0);
  message.op = CustodyOp::kDrop;
  ++message.version;
  EXPECT_THAT(Ask(raw, message).text, HasSubstr("a request of another version of custody"));
}

// Whoever answers to an offer with what was not offered.
TEST_F(CustodianTest, ADaemonRefusesACustodianOfOtherVersions) {
  EndCustodian();
  unlink(path_.c_str());
  auto socket = SocketPath::Bind(path_, SOCK_SEQPACKET, 0600);
  ASSERT_TRUE(socket.ok()) << socket.status();
  const Child custodian([&] {
    pollfd called{(*socket)->fd(), POLLIN, 0};  // which does not block
    if (poll(&called, 1, 5000) != 1) return 2;
    const UniqueFd peer(accept(called.fd, nullptr, nullptr));
    UniqueFd none;
    CustodyMessage answer = *ReceiveCustody(peer.get(), &none, absl::Seconds(5));
    answer.op = CustodyOp::kAnswer;
    answer.newest = static_cast<uint32_t>(kCustodyVersions.newest) + 1;
    return SendCustody(peer.get(), answer, -1, absl::Seconds(5)).ok() ? 0 : 1;
  });
  const absl::Status refused = Custody::Connect(path_, absl::Seconds(5)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("it goes on in a version of custody that was not offered"));
}

TEST_F(CustodianTest, AnOwnerThatIsStoppedKeepsOthersOut) {
  const auto owner = Owner("mine");
  owner->Kill(SIGSTOP);
  const auto other = Custody::Connect(path_, absl::Milliseconds(50));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr(absl::StrCat("pid ", owner->pid(), " owns")));
  owner->Kill(SIGKILL);
  EXPECT_TRUE(Custody::Connect(path_, absl::Seconds(5)).ok());
}

TEST_F(CustodianTest, WhatIsDroppedIsGoneAndNothingElse) {
  {
    auto custody = Custody::Connect(path_, absl::Seconds(5));
    ASSERT_TRUE(custody.ok()) << custody.status();
    const auto slab = Slab::Create("a", SlabBacking::kSealedMemfd, 4096);
    for (const uint64_t job : {1, 2, 3}) {
      EXPECT_TRUE((*custody)->Put(job, "a", (*slab)->fd()).ok());
      EXPECT_TRUE((*custody)->Put(job, "b", (*slab)->fd()).ok());
    }
    (*custody)->Drop(2);
    EXPECT_EQ((*custody)->Put(1, "Bad/Name", (*slab)->fd()).code(), absl::StatusCode::kInvalidArgument);
  }
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  const Custody::Objects objects = (*next)->TakeUp();
  EXPECT_EQ(objects.size(), 4u);
  EXPECT_EQ(objects.count({2, "a"}), 0u);
}

TEST_F(CustodianTest, OneThatIsStartedAnewGetsEverythingAgain) {
  auto custody = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(custody.ok()) << custody.status();
  const auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  std::strcpy((*slab)->At<char>(0), "again");
  ASSERT_TRUE((*custody)->Put(7, "shards", (*slab)->fd()).ok());
  EndCustodian();
  EXPECT_EQ((*custody)->Put(7, "more", (*slab)->fd()).code(), absl::StatusCode::kUnavailable);
  Start();
  (*custody)->Review();
  custody->reset();
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  Custody::Objects objects = (*next)->TakeUp();
  EXPECT_EQ(objects.size(), 2u) << "with what could not be put before";
  EXPECT_EQ(TextOf(objects), "again");
}

// The owner of before, whose connection the custodian has still, drops a job that the custodian then has no more.
TEST_F(CustodianTest, WhatWasDroppedWhileItWasAwayIsDroppedLater) {
  auto custody = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(custody.ok()) << custody.status();
  const auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  for (const uint64_t job : {7, 8}) ASSERT_TRUE((*custody)->Put(job, "shards", (*slab)->fd()).ok());
  custodian_->Kill(SIGSTOP);
  EXPECT_FALSE((*custody)->Put(8, "more", (*slab)->fd()).ok());  // after a while
  (*custody)->Drop(7);                                           // there is no connection
  custodian_->Kill(SIGCONT);
  EXPECT_TRUE(PollUntil([&] {
    (*custody)->Review();
    return Held() == 2;  // those of job 8
  }));
}

// As an embedded daemon does.
TEST_F(CustodianTest, WhereNobodyListensOneIsStartedAndEndsWithoutJobs) {
  const std::string own = folder_.File("own.sock");
  auto custody = Custody::Connect(own, absl::Seconds(5), testing::ProgramPath("shardd-custodian"));
  ASSERT_TRUE(custody.ok()) << custody.status();
  const auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  ASSERT_TRUE((*custody)->Put(7, "shards", (*slab)->fd()).ok());
  custody->reset();
  custody = Custody::Connect(own, absl::Seconds(5));
  ASSERT_TRUE(custody.ok()) << "it has a job, and stays: " << custody.status();
  EXPECT_EQ((*custody)->TakeUp().size(), 1u);
  (*custody)->Drop(7);
  custody->reset();
  EXPECT_TRUE(PollUntil([&] { return access(own.c_str(), F_OK) != 0; }));
}

TEST_F(CustodianTest, AProgramThatFailsIsStartedOnce) {
  const std::string marks = folder_.File("marks"), program = folder_.File("program");
  folder_.Write("program", absl::StrCat("#!/bin/sh\necho x >> ", marks, "\n"));
  ASSERT_EQ(chmod(program.c_str(), 0700), 0);
  const absl::Status status = Custody::Connect(folder_.File("none.sock"), absl::Minutes(5), program).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("does not listen"));
  EXPECT_EQ(testing::ReadWholeFile(marks), "x\n");
}

TEST_F(CustodianTest, WhatNobodyOwnsIsFreed) {
  EndCustodian();
  Start(absl::Seconds(1));
  Owner("forgotten")->Kill(SIGKILL);
  EXPECT_GT(Held(), 0);
  EXPECT_TRUE(PollUntil([this] { return Held() == 0; }));  // who connects to look would own it
}

TEST_F(CustodianTest, BytesThatAreNoRequestEndTheirConnectionAlone) {
  const auto owner = Owner("safe");
  const UniqueFd raw = Raw();
  ASSERT_EQ(send(raw.get(), "nonsense", 8, MSG_NOSIGNAL), 8);
  char byte;
  EXPECT_EQ(recv(raw.get(), &byte, 1, 0), 0) << "closed";
  // Of this version, and nobody's request.
  const UniqueFd other = Raw();
  CustodyMessage drop;
  drop.op = CustodyOp::kDrop;
  drop.job = 7;
  ASSERT_TRUE(SendCustody(other.get(), drop, -1, absl::Seconds(5)).ok());
  UniqueFd none;
  const auto answer = ReceiveCustody(other.get(), &none, absl::Seconds(5));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->code, static_cast<int>(absl::StatusCode::kFailedPrecondition)) << "it does not own anything";
  owner->Kill(SIGKILL);
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  Custody::Objects objects = (*next)->TakeUp();
  EXPECT_EQ(TextOf(objects), "safe");
}

// A process of its uid, with the socket, beside a daemon that lives.
TEST_F(CustodianTest, WhoIsNotTheOwnerIsRefusedWhateverItAsks) {
  const auto owner = Owner("safe");
  const UniqueFd raw = Raw();
  const auto other = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  for (const CustodyOp op : {CustodyOp::kOwn, CustodyOp::kPut, CustodyOp::kList, CustodyOp::kDrop}) {
    SCOPED_TRACE(static_cast<int>(op));
    CustodyMessage request;
    request.op = op;
    request.job = 7;
    request.SetName("shards");
    const CustodyMessage answer = Ask(raw, request, op == CustodyOp::kPut ? (*other)->fd() : -1);
    EXPECT_EQ(answer.op, CustodyOp::kAnswer);
    EXPECT_EQ(answer.code, static_cast<int>(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(answer.text, HasSubstr(op == CustodyOp::kOwn ? absl::StrCat("pid ", owner->pid(), " owns")
                                                             : "the sender is not the owner"));
  }
  EXPECT_EQ(Held(), 1);
  owner->Kill(SIGKILL);
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  Custody::Objects objects = (*next)->TakeUp();
  EXPECT_EQ(objects.size(), 1u);
  EXPECT_EQ(TextOf(objects), "safe");
}

// Also where nobody owns what is kept: between two daemons.
TEST_F(CustodianTest, ItsUidInAnotherUserNamespaceIsRefused) {
  constexpr int kNoNamespace = 77;
  Child attacker([this] {
    if (!testing::BecomeRootOfUserNamespace()) return kNoNamespace;
    return Custody::Connect(path_, absl::Milliseconds(100)).ok() ? 1 : 0;
  });
  const int code = attacker.Wait();
  if (code == kNoNamespace) GTEST_SKIP() << "this user can have no user namespace of its own (uid " << geteuid() << ")";
  EXPECT_EQ(code, 0) << "it owned what is kept";
  EXPECT_TRUE(Custody::Connect(path_, absl::Seconds(5)).ok());
}

// As full as its limit of open files allows: what it has it keeps, and whoever comes next has it.
TEST_F(CustodianTest, AFullOneNamesWhatItRefusesAndLosesNothing) {
  EndCustodian();
  Start(absl::Minutes(15), /*open_files=*/64);
  auto custody = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(custody.ok()) << custody.status();
  const auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  absl::Status status;
  uint64_t kept = 0;
  for (; kept < 64 && status.ok(); kept += status.ok() ? 1 : 0) {
    status = (*custody)->Put(kept + 1, "shards", (*slab)->fd());
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("put: the custodian is full"));
  EXPECT_GE(kept, 16u);
  // What takes the place of something needs no more; who comes besides has an answer.
  const auto newer = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  std::strcpy((*newer)->At<char>(0), "newer");
  EXPECT_TRUE((*custody)->Put(1, "shards", (*newer)->fd()).ok());
  CustodyMessage own;
  own.op = CustodyOp::kOwn;
  EXPECT_EQ(Ask(Raw(), own).code, static_cast<int>(absl::StatusCode::kFailedPrecondition));
  (*custody)->Drop(2);
  EXPECT_TRUE((*custody)->Put(kept + 1, "shards", (*slab)->fd()).ok()) << "there is room again";
  custody->reset();
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  Custody::Objects objects = (*next)->TakeUp();
  EXPECT_EQ(objects.size(), kept);
  EXPECT_EQ(TextOf(objects, 1), "newer");
}

// What a full one refused is not handed to the next one, which would be full of it.
TEST_F(CustodianTest, WhatWasRefusedIsNotHandedOverAgain) {
  EndCustodian();
  Start(absl::Minutes(15), /*open_files=*/64);
  auto custody = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(custody.ok()) << custody.status();
  const auto slab = Slab::Create("shards", SlabBacking::kSealedMemfd, 4096);
  uint64_t kept = 0;
  while (kept < 64 && (*custody)->Put(kept + 1, "shards", (*slab)->fd()).ok()) ++kept;
  EndCustodian();
  Start();
  (*custody)->Review();
  custody->reset();
  const auto next = Custody::Connect(path_, absl::Seconds(5));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->TakeUp().size(), kept);
}

TEST_F(CustodianTest, AnotherUidIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0) << "whatever the mode of its socket";
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  testing::RunAsUid(12345, [&] {
    const auto other = Custody::Connect(path_, absl::Milliseconds(100));
    EXPECT_FALSE(other.ok());
  });
  EXPECT_TRUE(Custody::Connect(path_, absl::Seconds(5)).ok());
}

}  // namespace
}  // namespace shardd
