// What a daemon of a release has left with its custodian: this build's daemon takes it up and trains on. And the
// requests of such a daemon, which this build's custodian answers as they were answered then.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/shm/slab.h"
#include "server/custodian/custody.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/versions/records.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class RecordedCustodian : public Cluster, public ::testing::WithParamInterface<std::string> {
 protected:
  void StartCustodian() {
    custodian_.reset();
    unlink(Custody().c_str());
    custodian_ = std::make_unique<Child>(testing::Spawn(
        {testing::ProgramPath("shardd-custodian"), "--listen=unix:" + Custody()}, {.log = File("custodian.log")}));
    ASSERT_TRUE(PollUntil([this] { return ConnectUnixSocket(Custody(), SOCK_SEQPACKET).valid(); }));
  }
  std::string Custody() const { return File("custody.sock"); }
  void StartKept() { StartDaemon({"--custodian=unix:" + Custody()}); }
  void KillDaemon() {
    ASSERT_EQ(kill(daemon_pid(), SIGKILL), 0);
    WaitForDaemon();
  }
  static Args Training(int steps) { return {{"steps", absl::StrCat(steps)}, {"recover", "1"}, {"optimizer", "adamw"}}; }
  // Ranks train to that step; the values that come of it, by rank.
  std::vector<std::string> TrainTo(int steps) {
    std::vector<std::string> values;
    for (const TrainerReport& report : RunRanks(Training(steps))) {
      EXPECT_EQ(report.code, 0) << report.message;
      std::string bytes;
      for (const auto& of_param : report.values) {
        bytes.append(reinterpret_cast<const char*>(of_param.data()), of_param.size() * sizeof(of_param[0]));
      }
      values.push_back(absl::BytesToHexString(bytes));
    }
    return values;
  }

  std::unique_ptr<Child> custodian_;
};

constexpr int kStep = 7;      // committed, when the daemon was killed
constexpr int kLastStep = 9;  // trained to from there

// "object <job> <name> <bytes>" and its bytes; "committed <step>"; "values <rank> <hex>" after kLastStep.
class CustodyText : public RecordedCustodian {};

std::string ObjectText(uint64_t job, const std::string& name, int fd) {
  struct stat object {};
  fstat(fd, &object);
  std::string bytes(static_cast<size_t>(object.st_size), '\0');
  EXPECT_EQ(pread(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return absl::StrCat("object ", job, " ", absl::StrReplaceAll(name, {{" ", "_"}}), " ", bytes.size(), "\n",
                      SparseText(bytes));
}

TEST_P(CustodyText, OfAWholeJobIsTakenUpAndTrainsOn) {
  const std::string text = Recorded(GetParam(), "custody.txt", [this] {
    StartCustodian();
    StartKept();
    const Args args = Training(kStep).With({{"pause", absl::StrCat("end@", kStep)}});
    {
      std::vector<Child> ranks;
      for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, args));
      for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "end", rank);
      KillDaemon();
    }
    std::string objects;
    {
      auto custody = Custody::Connect(Custody(), absl::Seconds(10));
      EXPECT_TRUE(custody.ok()) << custody.status();
      for (const auto& [key, fd] : (*custody)->TakeUp()) {
        if (key.second == "daemon") continue;  // a descriptor of the process, which has ended
        absl::StrAppend(&objects, ObjectText(key.first, key.second, fd.get()));
      }
    }
    StartKept();
    absl::StrAppend(&objects, "committed ", Job().committed_step(), "\n");
    const std::vector<std::string> values = TrainTo(kLastStep);
    for (size_t rank = 0; rank < values.size(); ++rank)
      absl::StrAppend(&objects, "values ", rank, " ", values[rank], "\n");
    StopDaemon();
    return objects;
  });
  StartCustodian();
  int64_t committed = -1;
  std::map<int64_t, std::string> want;
  {
    auto custody = Custody::Connect(Custody(), absl::Seconds(10));
    ASSERT_TRUE(custody.ok()) << custody.status();
    std::unique_ptr<Slab> slab;
    for (const Line& line : Lines(text)) {
      if (line.word(0) == "object") {
        auto made = Slab::Create("recorded", SlabBacking::kSealedMemfd, line.number(3));
        ASSERT_TRUE(made.ok()) << made.status();
        slab = *std::move(made);
        const std::string name = absl::StrReplaceAll(line.word(2), {{"_", " "}});
        ASSERT_TRUE((*custody)->Put(static_cast<uint64_t>(line.number(1)), name, slab->fd()).ok()) << name;
      } else if (line.word(0) == "at") {
        const std::string bytes = line.bytes(2);
        ASSERT_LE(line.number(1) + static_cast<int64_t>(bytes.size()), slab->size_bytes());
        std::copy(bytes.begin(), bytes.end(), slab->At<char>(line.number(1)));
      } else if (line.word(0) == "committed") {
        committed = line.number(1);
      } else {
        want[line.number(1)] = line.word(2);
      }
    }
  }
  StartKept();
  ASSERT_EQ(Job().committed_step(), committed);
  ASSERT_EQ(committed, kStep);
  const std::vector<std::string> got = TrainTo(kLastStep);
  ASSERT_EQ(got.size(), want.size());
  for (size_t rank = 0; rank < got.size(); ++rank) EXPECT_EQ(got[rank], want[static_cast<int64_t>(rank)]);
}

INSTANTIATE_TEST_SUITE_P(Of, CustodyText, ::testing::ValuesIn(RecordedVersions()),
                         [](const auto& info) { return VersionName(info.param); });

// "send <fd, or -> <hex>", "receive <how many descriptors> <hex>".
class CustodyWireText : public RecordedCustodian {
 protected:
  // What the custodian answers, with the number of descriptors that came along.
  static std::string Receive(int socket) {
    UniqueFd fd;
    const auto answer = ReceiveCustody(socket, &fd, absl::Seconds(10));
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) return "";
    return absl::StrCat(
        fd.valid() ? 1 : 0, " ",
        absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(&*answer), sizeof(*answer))));
  }
  static bool Send(int socket, const std::string& bytes, bool with_fd) {
    CustodyMessage message;
    if (bytes.size() != sizeof(message)) return false;
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(&message));
    const UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    return SendCustody(socket, message, with_fd ? fd.get() : -1, absl::Seconds(10)).ok();
  }
};

TEST_P(CustodyWireText, IsAnsweredAsItWas) {
  const auto record = [this] {
    StartCustodian();
    const UniqueFd socket = ConnectUnixSocket(Custody(), SOCK_SEQPACKET);
    std::string text;
    for (const CustodyOp op : {CustodyOp::kPut, CustodyOp::kOwn, CustodyOp::kPut, CustodyOp::kList, CustodyOp::kDrop,
                               CustodyOp::kList, static_cast<CustodyOp>(99)}) {
      CustodyMessage message;
      message.op = op;
      message.newest = op == CustodyOp::kOwn ? static_cast<uint32_t>(kCustodyVersions.newest) : 0;
      message.job = 7;
      message.SetName(op == CustodyOp::kPut ? "take-up log" : "");
      const std::string bytes(reinterpret_cast<const char*>(&message), sizeof(message));
      const bool with_fd = op == CustodyOp::kPut;
      EXPECT_TRUE(Send(socket.get(), bytes, with_fd));
      absl::StrAppend(&text, "send ", with_fd ? "fd " : "- ", absl::BytesToHexString(bytes), "\n");
      std::string answer;
      do {
        answer = Receive(socket.get());
        absl::StrAppend(&text, "receive ", answer, "\n");
      } while (op == CustodyOp::kList && answer[0] == '1');
    }
    return text;
  };
  const std::string text = Recorded(GetParam(), "custody_wire.txt", record);
  StartCustodian();
  const UniqueFd socket = ConnectUnixSocket(Custody(), SOCK_SEQPACKET);
  int answers = 0;
  for (const Line& line : Lines(text)) {
    if (line.word(0) == "send") {
      ASSERT_TRUE(Send(socket.get(), line.bytes(2), line.word(1) == "fd"));
    } else {
      EXPECT_EQ(Receive(socket.get()), absl::StrCat(line.word(1), " ", line.word(2)));
      ++answers;
    }
  }
  EXPECT_GT(answers, 7);
}

INSTANTIATE_TEST_SUITE_P(Of, CustodyWireText, ::testing::ValuesIn(RecordedVersions()),
                         [](const auto& info) { return VersionName(info.param); });

}  // namespace
}  // namespace shardd::e2e
