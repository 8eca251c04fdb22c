#include "server/metrics/kept_answers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace shardd {
namespace {

class KeptAnswersTest : public ::testing::Test {
 protected:
  // The number of the question, which takes `cost_`.
  int Get(const std::string& question = "all") {
    const auto answer = kept_.Get(question, [this](const int* before) -> absl::StatusOr<int> {
      before_ = before == nullptr ? -1 : *before;
      now_ += cost_;
      if (fails_) return absl::UnavailableError("nobody listens");
      return ++asked_;
    });
    return answer.ok() ? **answer : -1;
  }

  absl::Time now_ = absl::UnixEpoch();
  absl::Duration cost_;
  int asked_ = 0, before_ = 0;
  bool fails_ = false;
  KeptAnswers<int> kept_{[this] { return now_; }};
};

TEST_F(KeptAnswersTest, ASecondHasOneQuestionHoweverManyAsk) {
  for (int page = 0; page < 5; ++page) EXPECT_EQ(Get(), 1);
  now_ += absl::Milliseconds(999);
  EXPECT_EQ(Get(), 1);
  now_ += absl::Milliseconds(1);
  for (int page = 0; page < 5; ++page) EXPECT_EQ(Get(), 2);
  EXPECT_EQ(before_, 1);
  EXPECT_EQ(Get("another"), 3);
  EXPECT_EQ(before_, -1);
}

TEST_F(KeptAnswersTest, WhatTakesLongIsAskedLessOften) {
  cost_ = absl::Milliseconds(200);
  EXPECT_EQ(Get(), 1);
  now_ += absl::Seconds(3);
  EXPECT_EQ(Get(), 1);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Get(), 2);
}

TEST_F(KeptAnswersTest, ErrorsAreKeptToo) {
  fails_ = true;
  EXPECT_EQ(Get(), -1);
  fails_ = false;
  EXPECT_EQ(Get(), -1);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Get(), 1);
  EXPECT_EQ(before_, -1);
}

TEST_F(KeptAnswersTest, OldQuestionsAreForgottenAndNewOnesBounded) {
  for (size_t job = 0; job < KeptAnswers<int>::kMostQuestions; ++job) EXPECT_GT(Get(std::to_string(job)), 0);
  EXPECT_EQ(Get("one more"), -1);
  now_ += KeptAnswers<int>::kForgotten + absl::Seconds(1);
  EXPECT_GT(Get("one more"), 0);
  EXPECT_GT(Get("0"), 0);
  EXPECT_EQ(before_, -1);
}

TEST_F(KeptAnswersTest, WhileOneAsksOthersHaveTheAnswerBefore) {
  EXPECT_EQ(Get(), 1);
  now_ += absl::Seconds(1);
  absl::Notification asks, answered;
  std::thread slow([&] {
    const auto answer = kept_.Get("all", [&](const int*) -> absl::StatusOr<int> {
      asks.Notify();
      answered.WaitForNotification();
      return 7;
    });
    EXPECT_EQ(**answer, 7);
  });
  asks.WaitForNotification();
  EXPECT_EQ(Get(), 1);
  answered.Notify();
  slow.join();
  EXPECT_EQ(Get(), 7);
}

TEST_F(KeptAnswersTest, TheFirstAskersWaitForTheAnswer) {
  absl::Notification asks, answered;
  std::vector<std::thread> pages;
  pages.emplace_back([&] {
    kept_
        .Get("all",
             [&](const int*) -> absl::StatusOr<int> {
               asks.Notify();
               answered.WaitForNotification();
               return 7;
             })
        .IgnoreError();
  });
  asks.WaitForNotification();
  for (int page = 0; page < 3; ++page) {
    pages.emplace_back([&] { EXPECT_EQ(Get(), 7); });
  }
  answered.Notify();
  for (std::thread& page : pages) page.join();
  EXPECT_EQ(asked_, 0);
}

}  // namespace
}  // namespace shardd
