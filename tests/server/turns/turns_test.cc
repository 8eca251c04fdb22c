#include "server/turns/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace shardd {
namespace {

bool Anybody(WorkOwner) { return true; }

// Serves `turns` turns of one unit each; how many each owner had.
std::map<WorkOwner, int> Serve(Turns& turns, int count) {
  std::map<WorkOwner, int> served;
  for (int i = 0; i < count; ++i) {
    const std::optional<WorkOwner> next = turns.Next(Anybody);
    if (!next.has_value()) break;
    ++served[*next];
    turns.Charge(*next, 1);
  }
  return served;
}

TEST(TurnsTest, NobodyWithWorkIsNobodysTurn) {
  Turns turns(4);
  EXPECT_FALSE(turns.Next(Anybody).has_value());
  turns.Enter({1, 1});
  turns.Leave({1, 1});
  turns.Leave({1, 1});
  EXPECT_FALSE(turns.Next(Anybody).has_value());
}

TEST(TurnsTest, AUserOfSixtyJobsHasOneUsersShare) {
  Turns turns(4);
  for (uint64_t job = 0; job < 60; ++job) turns.Enter({1000, job});
  turns.Enter({2000, 100});
  std::map<WorkOwner, int> served = Serve(turns, 1200);
  EXPECT_EQ((served[{2000, 100}]), 600);
  for (uint64_t job = 0; job < 60; ++job) EXPECT_EQ((served[{1000, job}]), 10) << job;
}

TEST(TurnsTest, WhoComesLateIsServedAtOnceAndSavesLittle) {
  Turns turns(4);
  turns.Enter({1, 1});
  Serve(turns, 1000);
  turns.Enter({2, 2});
  EXPECT_EQ((Serve(turns, 4)[{2, 2}]), 4);
  EXPECT_NEAR((Serve(turns, 100)[{2, 2}]), 50, 1);
}

TEST(TurnsTest, ShortLivedJobsDoNotRaiseTheirUsersShare) {
  Turns turns(4);
  turns.Enter({1, 1});
  int mine = 0;
  for (uint64_t job = 2; job < 502; ++job) {
    turns.Enter({2, job});
    for (const auto& [owner, count] : Serve(turns, 2)) mine += owner.uid == 1 ? count : 0;
    turns.Leave({2, job});
  }
  EXPECT_GE(mine, 490);
}

TEST(TurnsTest, WhoIsNotReadyIsSkippedAndGoesFirstLater) {
  Turns turns(4);
  turns.Enter({1, 1});
  turns.Enter({1, 2});
  turns.Enter({2, 3});
  for (int i = 0; i < 10; ++i) {
    const std::optional<WorkOwner> next = turns.Next([](WorkOwner owner) { return owner.job == 2; });
    EXPECT_EQ(next->job, 2u);
    turns.Charge(*next, 1);
  }
  EXPECT_EQ(turns.Next(Anybody)->job, 3u);
  EXPECT_FALSE(turns.Next([](WorkOwner) { return false; }).has_value());
}

}  // namespace
}  // namespace shardd
