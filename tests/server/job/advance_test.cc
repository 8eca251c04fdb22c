#include "server/job/advance.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/job_core.h"
#include "tests/testing/build_paths.h"

namespace shardd {
namespace {

constexpr uint32_t kOfRanks = kAllStepped | kAllEntering | kAllFullParams | kAllCommitted | kAllExtend | kSomeInside |
                              kSomeWantToHandIn | kSomeBlocked | kSomeLate | kSomeLeft | kUnlikeCalls;
// For each fact those that do not hold with it, because commands are refused that would make it so.
constexpr struct {
  uint32_t fact;
  uint32_t never;
} kExclusive[] = {
    {kNobodyAttached, kOfRanks},
    {kAllStepped, kAllFullParams | kAllCommitted | kAllExtend | kSomeBlocked},
    {kAllEntering, kAllFullParams | kAllCommitted | kAllExtend | kSomeBlocked | kSomeWantToHandIn},
    {kAllFullParams, kAllExtend | kSomeBlocked | kSomeLate | kSomeWantToHandIn},
    {kAllCommitted, kAllExtend | kSomeBlocked | kSomeLate | kSomeWantToHandIn},
    {kAllExtend, kSomeInside | kSomeBlocked | kSomeLate | kSomeLeft | kSomeWantToHandIn},
    {kApplied, kSomeBlocked | kSomeLate},
    {kUnlikeCalls,
     kAllStepped | kAllEntering | kAllFullParams | kAllCommitted | kAllExtend | kSomeInside | kSomeBlocked},
};

// By bit, as in the table of README.md.
constexpr const char* kFactNames[] = {"pooled",
                                      "over nodes",
                                      "trainers write",
                                      "pass copies",
                                      "committing",
                                      "applied",
                                      "deciding",
                                      "reducing",
                                      "some hand in",
                                      "ending",
                                      "all stepped",
                                      "all entering",
                                      "all in EnterFullParams",
                                      "all in CommitParameters",
                                      "some inside",
                                      "some want to hand in",
                                      "some blocked",
                                      "some late",
                                      "some left",
                                      "owes word",
                                      "all in ExtendJob",
                                      "nobody attached",
                                      "unlike calls"};
static_assert(sizeof kFactNames / sizeof *kFactNames == kFacts);

std::string Names(uint32_t facts) {
  std::vector<std::string> names;
  for (int bit = 0; bit < kFacts; ++bit) {
    if ((facts >> bit & 1) != 0) {
      names.emplace_back(kFactNames[bit]);
    }
  }
  return absl::StrJoin(names, ", ");
}

bool MayBothBeOpen(const Transition& a, const Transition& b) {
  const uint32_t needs = a.needs | b.needs;
  if ((needs & (a.unless | b.unless)) != 0) {
    return false;
  }
  for (const auto& [fact, never] : kExclusive) {
    if ((needs & fact) != 0 && (needs & never) != 0) {
      return false;
    }
  }
  return true;
}

// Numbers of the rows below it that may be open at the same time.
std::vector<int> GoesBefore(size_t row) {
  const auto rows = JobCore::Transitions();
  std::vector<int> below;
  for (size_t other = row + 1; other < rows.size(); ++other) {
    if (MayBothBeOpen(rows[row], rows[other])) {
      below.push_back(static_cast<int>(other) + 1);
    }
  }
  return below;
}

std::string Table() {
  std::string text =
      "| | row | needs | unless | waits for | what it is for | goes before | because |\n|-|-|-|-|-|-|-|-|\n";
  const auto rows = JobCore::Transitions();
  for (size_t i = 0; i < rows.size(); ++i) {
    absl::StrAppend(&text, "| ", i + 1, " | ", rows[i].name, " | ", Names(rows[i].needs), " | ", Names(rows[i].unless),
                    " | ", rows[i].waits, " | ", rows[i].why, " | ", absl::StrJoin(GoesBefore(i), ", "), " | ",
                    rows[i].order, " |\n");
  }
  return text;
}

TEST(AdvanceTest, EveryRowHasItsOwnNameAndReason) {
  std::set<std::string> names;
  std::set<std::string> whys;
  for (const Transition& row : JobCore::Transitions()) {
    EXPECT_NE(std::string(row.name), "");
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_NE(std::string(row.why), "") << row.name;
    EXPECT_TRUE(whys.insert(row.why).second) << row.name;
    EXPECT_NE(row.may, nullptr) << row.name;
    EXPECT_EQ(row.needs & row.unless, 0u) << row.name << " can never be open";
  }
}

TEST(AdvanceTest, RowsThatWaitForARankSayForWhat) {
  int waiting = 0;
  for (const Transition& row : JobCore::Transitions()) {
    if (row.waits_for != nullptr) {
      ++waiting;
      EXPECT_NE(std::string(row.waits), "") << row.name;
    }
  }
  EXPECT_GE(waiting, 8);
}

TEST(AdvanceTest, RowsThatMayBeOpenTogetherStateTheirOrder) {
  const auto rows = JobCore::Transitions();
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(GoesBefore(i).empty(), std::string(rows[i].order).empty())
        << rows[i].name << ", before rows " << absl::StrJoin(GoesBefore(i), ", ") << ": " << rows[i].order;
  }
}

TEST(AdvanceTest, TheReadmeShowsTheTable) {
  const std::string path = absl::StrCat(built::kSourceDir, "/server/job/README.md");
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const std::string table = Table();
  EXPECT_NE(text.str().find(table), std::string::npos) << path << " should have this table:\n" << table;
}

}  // namespace
}  // namespace shardd
