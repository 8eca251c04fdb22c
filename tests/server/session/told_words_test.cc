#include "server/session/told_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kEpoch = 3;

class Kept final : public SessionStream {
 public:
  void Send(v1::SessionEvent event) override { texts.push_back(event.words().ShortDebugString()); }
  void Finish(absl::Status) override {}
  std::vector<std::string> texts;
};

class SessionToldTest : public ::testing::Test {
 protected:
  explicit SessionToldTest(bool trainer_sums = false) {
    SpecBuilder builder(1);
    builder.config().set_trainer_sums(trainer_sums);
    builder.Param(0, "w", {8});
    builder.Param(builder.AddSharded(0, "a"), "w", {8});
    auto session = Session::Create(std::make_shared<const ShardPlan>(builder.Plan()), /*id=*/1, /*rank=*/0, kEpoch);
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    session_->stream = stream_;
  }
  ~SessionToldTest() override { loop_.Stop(); }
  // In one turn of the loop; what was told by its end.
  template <typename F>
  std::vector<std::string> Turn(F body) {
    loop_.RunAndWait([&] { body(session_->words()); });
    std::vector<std::string> texts;
    loop_.RunAndWait([&] { texts = std::exchange(stream_->texts, {}); });
    return texts;
  }
  absl::Status Tell(uint64_t version = 0) {
    absl::Status status;
    loop_.RunAndWait([&] { status = session_->TellWords(&loop_, version); });
    return status;
  }

  CoreLoop loop_;
  const std::shared_ptr<Kept> stream_ = std::make_shared<Kept>();
  std::unique_ptr<Session> session_;
};

TEST_F(SessionToldTest, NothingIsToldToWhomeverReadsTheWords) {
  EXPECT_THAT(Turn([](SessionWords& words) { words.PublishVersion(5); }), ElementsAre());
}

TEST_F(SessionToldTest, FirstTheVersionIsTold) {
  ASSERT_TRUE(Tell(7).ok());
  EXPECT_THAT(Turn([](SessionWords&) {}), ElementsAre("version: 7"));
}

TEST_F(SessionToldTest, WhatChangesWithinATurnIsOneEvent) {
  ASSERT_TRUE(Tell(1).ok());
  Turn([](SessionWords&) {});
  EXPECT_THAT(Turn([&](SessionWords& words) {
                words.PublishVersion(2);
                words.PublishVersion(3);
                words.PublishFullParams();
                words.PublishHandIn();
                session_->PublishConsumed();
                session_->PublishConsumed();
              }),
              ElementsAre("consumed: 2 version: 3 full_params: 1 hand_ins: 1"));
  EXPECT_THAT(Turn([&](SessionWords&) { session_->PublishConsumed(); }), ElementsAre("consumed: 3"));
}

TEST_F(SessionToldTest, EveryWordOfThePageIsTold) {
  ASSERT_TRUE(Tell(1).ok());
  Turn([](SessionWords&) {});
  const std::vector<std::string> told = Turn([&](SessionWords& words) {
    words.CountBackward();
    words.PublishOthersGave(0);
    words.PublishReducing(1);
    words.PublishReduced(1);
    words.PublishPassIssued();
    words.PublishPass();
    words.PublishSlotIssued(0);
    words.PublishSlotReleased(0);
    words.PublishUnshardIssued(1, 4, 64);
    words.PublishUnsharded(1, 4);
  });
  EXPECT_THAT(told, ElementsAre("passes: 1 passes_issued: 1 reduced: 1 reducing: 1 "
                                "slots { key: 0 value { released: 1 issued: 1 } } "
                                "groups { key: 1 value { unsharded: 4 pool_offset_bytes: 64 issued: 4 } } "
                                "others_gave: 1"));
}

// Else the newer of two events that are merged would take back what the older says of the entry.
TEST_F(SessionToldTest, AnEntryIsToldAsAWhole) {
  ASSERT_TRUE(Tell(1).ok());
  Turn([](SessionWords& words) { words.PublishUnshardIssued(1, 4, 64); });
  EXPECT_THAT(Turn([](SessionWords& words) { words.PublishUnsharded(1, 4); }),
              ElementsAre("groups { key: 1 value { unsharded: 4 pool_offset_bytes: 64 issued: 4 } }"));
}

TEST_F(SessionToldTest, TheEndOfItsEpochIsTold) {
  ASSERT_TRUE(Tell(1).ok());
  Turn([](SessionWords&) {});
  EXPECT_THAT(Turn([&](SessionWords& words) {
                session_->Poison(kEpoch + 1);
                words.PublishVersion(2);
              }),
              ElementsAre("epoch: 4"));
}

TEST_F(SessionToldTest, WhatIsPostedOutlivesTheSession) {
  ASSERT_TRUE(Tell(1).ok());
  EXPECT_THAT(Turn([&](SessionWords& words) {
                words.PublishVersion(2);
                session_ = nullptr;
              }),
              ElementsAre("version: 1", "version: 2"));
}

TEST_F(SessionToldTest, ItIsTooLateBehindACommand) {
  session_->commands = 1;
  const absl::Status status = Tell();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("before the first command (got 1 commands, want 0)"));
  EXPECT_EQ(session_->words().told(), nullptr);
}

TEST_F(SessionToldTest, TellingAgainChangesNothing) {
  ASSERT_TRUE(Tell(1).ok());
  Turn([&](SessionWords&) { session_->PublishConsumed(); });
  session_->commands = 1;
  EXPECT_TRUE(Tell(1).ok());
  EXPECT_THAT(Turn([&](SessionWords&) { session_->PublishConsumed(); }), ElementsAre("consumed: 2"));
}

class SummingSessionToldTest : public SessionToldTest {
 protected:
  SummingSessionToldTest() : SessionToldTest(/*trainer_sums=*/true) {}
};

TEST_F(SummingSessionToldTest, TrainersThatAddHearOfItInTheirPages) {
  const absl::Status status = Tell();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("trainerSums false"));
}

}  // namespace
}  // namespace shardd
