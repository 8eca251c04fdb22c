#include "server/job/membership/sessions.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/wait.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

class SessionsTest : public ::testing::Test {
 protected:
  SessionsTest() {
    SpecBuilder builder(2);
    builder.Param(0, "w", {8});
    plan_ = std::make_shared<const ShardPlan>(builder.Plan());
  }
  ~SessionsTest() override { loop_.Stop(); }

  void Add(int rank, uint64_t id) {
    auto session = Session::Create(plan_, id, rank, /*epoch=*/1);
    ASSERT_TRUE(session.ok()) << session.status();
    loop_.RunAndWait([&] { sessions_.Add(*std::move(session)); });
  }
  void Watch(int rank, const testing::Child& child) {
    loop_.RunAndWait([&] {
      sessions_.WatchProcess(sessions_[rank].get(), UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, child.pid(), 0))),
                             [this, rank] {
                               ++ended_;
                               sessions_.ForgetProcess(*sessions_[rank]);
                             });
    });
  }
  static int Sleep() {
    pause();
    return 0;
  }

  std::shared_ptr<const ShardPlan> plan_;
  std::atomic<int> ended_ = 0;
  CoreLoop loop_;
  Sessions sessions_{2, &loop_};
};

TEST_F(SessionsTest, AreFoundByIdWhileTheyAreThere) {
  Add(1, 7);
  EXPECT_EQ(sessions_.attached(), 1);
  EXPECT_EQ(sessions_.Find(7), sessions_[1].get());
  EXPECT_EQ(sessions_.Find(8), nullptr);
  loop_.RunAndWait([&] {
    sessions_.Unwatch(*sessions_[1]);
    EXPECT_EQ(sessions_.Take(1)->id(), 7u);
  });
  EXPECT_EQ(sessions_.attached(), 0);
  EXPECT_EQ(sessions_.Find(7), nullptr);
}

class KeptStream final : public SessionStream {
 public:
  void Send(v1::SessionEvent event) override { said.push_back(std::move(event)); }
  void Finish(absl::Status) override {}

  std::vector<v1::SessionEvent> said;
};

TEST(ManySessionsTest, HearForWhomTheyWaitOnceInSmallBatches) {
  constexpr int kRanks = 40;
  SpecBuilder builder(kRanks);
  builder.Param(0, "w", {kRanks});
  const auto plan = std::make_shared<const ShardPlan>(builder.Plan());
  CoreLoop loop;
  Sessions sessions(kRanks, &loop);
  std::vector<std::shared_ptr<KeptStream>> streams;
  int asked = 0;
  loop.RunAndWait([&] {
    const auto text = [&asked](int rank) {
      ++asked;
      return absl::StrCat("who ", rank, " waits for");
    };
    for (int rank = 0; rank < kRanks; ++rank) {
      auto session = Session::Create(plan, rank + 1, rank, /*epoch=*/1);
      ASSERT_TRUE(session.ok()) << session.status();
      streams.push_back(std::make_shared<KeptStream>());
      (*session)->stream = streams.back();
      sessions.Add(*std::move(session));
    }
    const absl::Time later = MonotonicNow() + absl::Seconds(1);
    sessions.TellWaiting(later, text);
    EXPECT_EQ(asked, 16);
    for (int i = 0; i < 5; ++i) sessions.TellWaiting(later, text);
  });
  EXPECT_EQ(asked, 6 * 16);
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(streams[rank]->said.size(), 1u) << rank;
    EXPECT_EQ(streams[rank]->said[0].waiting().for_what(), absl::StrCat("who ", rank, " waits for"));
  }
  loop.Stop();
}

TEST_F(SessionsTest, TheEndOfAProcessIsToldOnce) {
  const testing::Child child(Sleep);
  Add(0, 1);
  Watch(0, child);
  Watch(0, child);  // it has its process
  child.Kill();
  EXPECT_TRUE(testing::PollUntil([&] { return ended_ > 0; }));
  loop_.RunAndWait([] {});
  EXPECT_EQ(ended_, 1);
}

TEST_F(SessionsTest, TheEndOfAProcessIsNotTheNextSessions) {
  testing::Child child(Sleep);
  Add(0, 1);
  Watch(0, child);
  std::unique_ptr<Session> gone;
  loop_.RunAndWait([&] { gone = sessions_.Take(0); });  // still watched
  Add(0, 2);
  child.Kill();
  EXPECT_NE(child.Wait(), -1);
  loop_.RunAndWait([] {});
  loop_.RunAndWait([&] { sessions_.Unwatch(*gone); });
  EXPECT_EQ(ended_, 0);
}

class KeptEvents final : public SessionStream {
 public:
  void Send(v1::SessionEvent event) override { waits.push_back(event.waiting().for_what()); }
  void Finish(absl::Status) override {}
  std::vector<std::string> waits;
};

TEST_F(SessionsTest, AQuietRankHearsOnceForWhomItWaits) {
  Add(1, 7);
  const auto stream = std::make_shared<KeptEvents>();
  sessions_[1]->stream = stream;
  const absl::Time now = MonotonicNow();
  sessions_[1]->last_command_time = now;
  std::string text = "rank 0: Step";
  const auto wait_text = [&](int) { return text; };
  sessions_.TellWaiting(now, wait_text);
  EXPECT_TRUE(stream->waits.empty()) << "it has just sent something";
  sessions_.TellWaiting(now + absl::Seconds(1), wait_text);
  sessions_.TellWaiting(now + absl::Seconds(2), wait_text);
  EXPECT_EQ(stream->waits, std::vector<std::string>{"rank 0: Step"});
  text = "";
  sessions_.TellWaiting(now + absl::Seconds(3), wait_text);
  EXPECT_EQ(stream->waits.back(), "") << "it waits no more";
}

}  // namespace
}  // namespace shardd
