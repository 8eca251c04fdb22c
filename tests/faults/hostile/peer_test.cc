// What a daemon may say to another one of a job that is cut over nodes, and no daemon says: it is refused, or ends an
// attempt of that job with words that name the node; the daemon lives and serves others.

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/job/wait.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/faults/peer_daemon.h"
#include "tests/faults/raw_client.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr uint64_t kMaxWord = std::numeric_limits<uint64_t>::max();

class HostilePeer : public e2e::Nodes {
 protected:
  // Node 0 has a rank, which has begun its first forward and waits for what node 1 holds.
  void Begin(const e2e::Args& extra = {}) {
    Meet(extra);
    ASSERT_TRUE(peer_->WaitAsked(16, &asked_));
    while (peer_->HeldBytes(own_group_, 0) == 0) ++own_group_;
    own_bytes_ = peer_->HeldBytes(own_group_, 0);
    asked_bytes_ = peer_->HeldBytes(asked_.pull().group(), 1);
  }
  // Node 0 has a rank, and both have begun.
  void Meet(const e2e::Args& extra) {
    Start(2, 1);
    args_ = e2e::Args({{"strategy", "FULL_SHARD"}, {"steps", "3"}}).With(extra);
    rank_ = std::make_unique<testing::Child>(StartRank(0, 0, args_));
    peer_ = std::make_unique<PeerDaemon>(SpecOf(Of(0, args_)), addresses());
  }
  void ExpectServes(uint64_t transfer) {
    peer_->Send(peer_->Pull(transfer, own_group_, 1));
    EXPECT_TRUE(peer_->WaitData(transfer, own_bytes_));
  }
  void ExpectRefused(const v1::PeerMessage& pull, const std::string& text) {
    peer_->Send(pull);
    std::string why;
    EXPECT_TRUE(peer_->WaitRefused(pull.pull().transfer(), &why));
    EXPECT_TRUE(absl::StrContains(why, text)) << why;
  }
  // The rank's attempt has ended with these words.
  void ExpectEnds(const std::string& text) {
    EXPECT_EQ(rank_->Wait(), 0);
    const e2e::TrainerReport report = Report(0, 0, args_);
    EXPECT_NE(report.code, 0);
    EXPECT_TRUE(absl::StrContains(report.message, text)) << report.message;
  }
  void ExpectServesOthers() {
    EXPECT_TRUE(node(0).DaemonAlive());
    const e2e::Args other = {{"world", "1"}, {"name", "bystander"}, {"steps", "5"}};
    EXPECT_EQ(node(0).StartRank(0, other).Wait(), 0);
    e2e::ExpectParity(other, {node(0).Report(other, 0)});
  }

  e2e::Args args_;
  std::unique_ptr<testing::Child> rank_;
  std::unique_ptr<PeerDaemon> peer_;
  v1::PeerMessage asked_;  // the rank's daemon, of this one
  int64_t asked_bytes_ = 0;
  int own_group_ = 0;  // of which node 0 holds something
  int64_t own_bytes_ = 0;
};

TEST_F(HostilePeer, IsServedWhatExistsAndRefusedTheRest) {
  Begin();
  ExpectServes(1);
  ExpectRefused(peer_->Pull(2, -1, 1), "no such group or version (got group -1 of version 1, want a group below 4");
  ExpectRefused(peer_->Pull(3, std::numeric_limits<int>::max(), 1), "no such group");
  ExpectRefused(peer_->Pull(4, std::numeric_limits<int>::min(), kMaxWord), "no such group");
  ExpectRefused(peer_->Pull(5, 0, 0), "no such group or version (got group 0 of version 0");
  peer_->Send(peer_->Pull(6, own_group_, kMaxWord));  // it may come to that
  ExpectRefused(peer_->Pull(6, own_group_, 1), "transfer 6 was asked for before");
  ExpectServes(kMaxWord);
  EXPECT_FALSE(node(0).HasEvent("job", "abort", ""));
  ExpectServesOthers();
}

// Of versions that never come, and of such that are there: faster than they can be sent.
TEST_F(HostilePeer, AsksWithoutEndAndGetsNoMemoryForIt) {
  Begin();
  const auto resident = [&] {
    std::ifstream status(absl::StrCat("/proc/", node(0).daemon_pid(), "/status"));
    int64_t kib = 0;
    for (std::string line; std::getline(status, line);) {
      if (absl::StartsWith(line, "VmRSS:")) kib = std::atoll(line.c_str() + 6);
    }
    return kib * 1024;
  };
  ExpectServes(1);
  const int64_t before = resident();
  constexpr uint64_t kPulls = 100'000;
  for (uint64_t i = 0; i < kPulls; ++i) peer_->Send(peer_->Pull(2 + i, own_group_, 1000 + i % 2));
  std::string why;
  EXPECT_TRUE(peer_->WaitRefused(2 + 8, &why));  // twice as many as there are groups are kept
  EXPECT_TRUE(absl::StrContains(why, "too much is asked for at a time (want at most 8)")) << why;
  uint64_t last = 2 + kPulls;  // answers to some are dropped, too
  EXPECT_TRUE(testing::PollUntil([&] {
    peer_->Send(peer_->Pull(++last, own_group_, 1));
    for (uint64_t asked = 3 + kPulls; asked < last; ++asked) {
      if (peer_->Refused(asked, &why)) return true;
    }
    return false;
  }));
  // A sanitizer keeps what was freed.
  EXPECT_LT(resident(), before + (int64_t{testing::kSanitized ? 512 : 48} << 20));
  EXPECT_FALSE(node(0).HasEvent("job", "abort", ""));
  ExpectServesOthers();
}

struct Lie {
  const char* name;
  void (*tell)(PeerDaemon& peer, const v1::PeerMessage& asked, int64_t bytes);
  const char* found;  // by the daemon
};
std::ostream& operator<<(std::ostream& out, const Lie& lie) { return out << lie.name; }

class HostilePeerData : public HostilePeer, public ::testing::WithParamInterface<Lie> {};

TEST_P(HostilePeerData, EndsTheAttemptAndIsNamed) {
  Begin();
  GetParam().tell(*peer_, asked_, asked_bytes_);
  ExpectEnds(GetParam().found);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args_).message, "node 1")) << Report(0, 0, args_).message;
  ExpectServesOthers();
}

using Pulled = const v1::PeerMessage&;
INSTANTIATE_TEST_SUITE_P(
    Lies, HostilePeerData,
    ::testing::Values(
        Lie{"NeverAskedFor",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) {
              peer.SendData(asked, 0, bytes, [](v1::PeerData* header) { header->set_sequence(kMaxWord); });
            },
            "transfer 18446744073709551615: it was not asked for that"},
        Lie{"TwiceTheSame",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) {
              for (int i = 0; i < 2; ++i) peer.SendData(asked, 0, bytes);
            },
            "it was not asked for that"},
        Lie{"TheBeginningTwice",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              for (int i = 0; i < 2; ++i) peer.SendData(asked, 0, 4);
            },
            "was to be sent (got 4 bytes at 0"},
        Lie{"NotTheBeginning",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) { peer.SendData(asked, bytes - 4, 4); },
            "was to be sent (got 4 bytes at"},
        Lie{"OfAHugeOne",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              peer.SendData(asked, 0, 4, [](v1::PeerData* header) { header->set_numel(kMax); });
            },
            "was to be sent (got 4 bytes at 0 of 9223372036854775807"},
        Lie{"MoreThanThereIs",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) {
              peer.SendData(asked, 0, bytes + 1, [&](v1::PeerData* header) { header->set_numel(bytes + 1); });
            },
            "another part of group"},
        Lie{"BeforeTheBeginning", [](PeerDaemon& peer, Pulled asked, int64_t) { peer.SendData(asked, -4, 4); },
            "elements lie outside of the sum (got 4 at -4"},
        Lie{"BeyondAllNumbers",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              peer.SendData(asked, kMax, 4, [](v1::PeerData* header) { header->set_numel(kMax); });
            },
            "elements lie outside of the sum"},
        Lie{"OfANegativeSize",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              peer.SendData(asked, 0, 4, [](v1::PeerData* header) { header->set_numel(-1); });
            },
            "elements lie outside of the sum"},
        Lie{"OfAnUnknownSlab",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) {
              peer.SendData(asked, 0, bytes, [](v1::PeerData* header) { header->set_slab(static_cast<v1::Slab>(77)); });
            },
            "bytes are no shardd.v1.PeerData"},
        Lie{"OfAnAttemptBeyondAll",
            [](PeerDaemon& peer, Pulled asked, int64_t bytes) {
              peer.SendData(asked, 0, bytes, [](v1::PeerData* header) { header->set_generation(kMaxWord); });
            },
            "there is no attempt of that number (got 18446744073709551615"},
        Lie{"AsksOfAnAttemptBeyondAll",
            [](PeerDaemon& peer, Pulled, int64_t) {
              v1::PeerMessage pull = peer.Pull(1, 0, 1);
              pull.set_generation(kMaxWord);
              peer.Send(pull);
            },
            "there is no attempt of that number (got 18446744073709551615"},
        Lie{"BeginsAnAttemptBeyondAll",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              v1::PeerMessage begin;
              begin.set_generation(asked.generation());
              begin.mutable_begin()->set_generation(kMaxWord);
              peer.Send(begin);
            },
            "there is no attempt of that number (got 18446744073709551615"},
        Lie{"RefusesWhatItWasNotAsked",
            [](PeerDaemon& peer, Pulled, int64_t) {
              v1::PeerMessage answer = peer.Pull(kMaxWord, 0, 1);
              answer.mutable_pull()->set_code(-1);
              peer.Send(answer);
            },
            "refuses what it was not asked for (transfer 18446744073709551615)"},
        Lie{"RefusesWithNoCode",
            [](PeerDaemon& peer, Pulled asked, int64_t) {
              v1::PeerMessage answer = asked;
              answer.mutable_pull()->set_code(std::numeric_limits<int>::min());
              answer.mutable_pull()->set_message(std::string(1 << 20, 'x'));
              peer.Send(answer);
            },
            "node 1 does not send version 1: xxx"}),
    [](const auto& info) { return std::string(info.param.name); });

// Ranks edit parameters in place: the daemons say of each pass whether there are edits, and then write them back.
class HostilePeerEdits : public HostilePeer {
 protected:
  // Node 0's rank waits to enter its first pass, in which it stores nothing.
  void BeginEdits() {
    Meet({{"trainers_write", "1"}, {"edits", "1"}});
    ASSERT_TRUE(peer_->WaitSaid([](const v1::PeerMessage& message) { return message.has_values_agreed(); }));
  }
  v1::PeerMessage Asks(int times, const std::function<void(v1::PeerMessage::AsksToWrite*)>& change = nullptr) const {
    v1::PeerMessage message;
    message.set_generation(peer_->generation());
    v1::PeerMessage::AsksToWrite& asks = *message.mutable_asks_to_write();
    asks.set_version(2);
    asks.set_times(times);
    if (change != nullptr) change(&asks);
    return message;
  }
  bool WaitMayWrite(int times) {
    return peer_->WaitSaid([times](const v1::PeerMessage& message) { return message.may_write().times() == times; });
  }
  // As if this node's ranks had edited; node 0's come back to write.
  void SayEdited() {
    peer_->Send(Asks(1, [](auto* asks) {
      asks->set_of_pass(true);
      asks->set_edited(true);
    }));
    ASSERT_TRUE(WaitMayWrite(1));
  }
  static void OfEdits(v1::PeerMessage::AsksToWrite* asks) {
    asks->set_group(-1);
    asks->set_recurse(true);
    asks->set_of_edits(true);
  }
  // Until this node and node 0 may write what was edited.
  void AwaitTurnToWrite() {
    BeginEdits();
    ASSERT_NO_FATAL_FAILURE(SayEdited());
    peer_->Send(Asks(2, OfEdits));
    ASSERT_TRUE(WaitMayWrite(2));
  }
  // Version 2 of so many parameters, as if each were of this digest.
  void SendValues(size_t params, uint64_t digest) {
    v1::PeerMessage values;
    values.set_generation(peer_->generation());
    values.mutable_values()->set_version(2);
    for (size_t i = 0; i < params; ++i) values.mutable_values()->add_digests(digest);
    peer_->Send(values);
  }
};

struct Ask {
  const char* name;
  int times;
  void (*change)(v1::PeerMessage::AsksToWrite* asks);
  const char* found;
};
std::ostream& operator<<(std::ostream& out, const Ask& ask) { return out << ask.name; }

class HostilePeerAsks : public HostilePeerEdits, public ::testing::WithParamInterface<Ask> {};

TEST_P(HostilePeerAsks, EndTheAttemptAndAreNamed) {
  BeginEdits();
  peer_->Send(Asks(GetParam().times, GetParam().change));
  ExpectEnds(GetParam().found);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args_).message, "node 1")) << Report(0, 0, args_).message;
  ExpectServesOthers();
}

constexpr int kMost = std::numeric_limits<int>::max();
using Asked = v1::PeerMessage::AsksToWrite*;
INSTANTIATE_TEST_SUITE_P(Lies, HostilePeerAsks,
                         ::testing::Values(Ask{"OfNoTime", 0, [](Asked asks) { asks->set_of_pass(true); },
                                               "enters a pass: not its turn"},
                                           Ask{"OfATimeBeforeAll", -kMost, [](Asked asks) { asks->set_of_edits(true); },
                                               "time -2147483647, want version 2"},
                                           Ask{"OfATimeBeyondAll", kMost, [](Asked asks) { asks->set_of_edits(true); },
                                               "time 2147483647, want version 2"},
                                           Ask{"OfAVersionBeyondAll", 1,
                                               [](Asked asks) {
                                                 asks->set_of_edits(true);
                                                 asks->set_version(kMaxWord);
                                               },
                                               "got version 18446744073709551615"},
                                           Ask{"OfNoVersion", 1,
                                               [](Asked asks) {
                                                 asks->set_of_pass(true);
                                                 asks->set_version(0);
                                               },
                                               "got version 0"},
                                           Ask{"ToWriteEditsWhereOthersEnter", 1,
                                               [](Asked asks) {
                                                 asks->set_of_edits(true);
                                                 asks->set_group(kMost);
                                               },
                                               "nodes differ in what their ranks commit"}),
                         [](const auto& info) { return info.param.name; });

TEST_F(HostilePeerEdits, OfAnotherGroupAreNamed) {
  BeginEdits();
  ASSERT_NO_FATAL_FAILURE(SayEdited());
  peer_->Send(Asks(2, [](auto* asks) {
    OfEdits(asks);
    asks->set_group(-kMost);
  }));
  ExpectEnds("asks to write others than node 0 (got group -2147483647");
  ExpectServesOthers();
}

TEST_F(HostilePeerEdits, WithValuesOfNoParameterAreNamed) {
  ASSERT_NO_FATAL_FAILURE(AwaitTurnToWrite());
  SendValues(100'000, kMaxWord);
  ExpectEnds("not its turn, or not of all parameters (got version 2 and 100000 digests");
  ExpectServesOthers();
}

TEST_F(HostilePeerEdits, WithOtherValuesAreNamed) {
  ASSERT_NO_FATAL_FAILURE(AwaitTurnToWrite());
  SendValues(peer_->plan().params.size(), kMaxWord);
  ExpectEnds("node 1");
  ExpectServesOthers();
}

TEST_F(HostilePeerEdits, ValuesBeforeAllMayWriteAreNamed) {
  BeginEdits();
  SendValues(peer_->plan().params.size(), 0);
  ExpectEnds("initial values or later ones: not its turn");
  ExpectServesOthers();
}

}  // namespace
}  // namespace shardd::faults
