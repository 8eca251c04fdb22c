#include "common/handle/handle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/build_paths.h"

namespace shardd {
namespace {

using E = HandleEvent;
using S = StorageState;
using T = TrainingState;
using ::testing::HasSubstr;

constexpr E kEvents[] = {E::kUnshardForward,  E::kUnshardBackward, E::kUnshardDone, E::kReshard,
                         E::kSubmitGradients, E::kBackwardDone,    E::kStep,        E::kEnterFullParams,
                         E::kLeaveFullParams, E::kAbandon};

// A reachable state and how to get there.
struct State {
  const char* name;
  std::vector<E> path;
};

std::vector<State> ReachableStates() {
  const std::vector<E> forward = {E::kUnshardForward};
  const std::vector<E> pre = {E::kUnshardForward, E::kUnshardDone, E::kReshard, E::kUnshardBackward};
  std::vector<E> post = pre;
  post.push_back(E::kSubmitGradients);
  std::vector<E> idle_held = post;
  idle_held.push_back(E::kBackwardDone);
  const auto with = [](std::vector<E> path, std::vector<E> more) {
    path.insert(path.end(), more.begin(), more.end());
    return path;
  };
  return {
      {"SHARDED/IDLE", {}},
      {"UNSHARDING(1)/IDLE", idle_held},
      {"UNSHARDED(1)/IDLE", with(idle_held, {E::kUnshardDone})},
      {"SHARDED/FORWARD", with(forward, {E::kReshard})},
      {"UNSHARDING(1)/FORWARD", forward},
      {"UNSHARDED(1)/FORWARD", with(forward, {E::kUnshardDone})},
      {"SHARDED/BACKWARD_PRE", with(pre, {E::kReshard})},
      {"UNSHARDING(1)/BACKWARD_PRE", pre},
      {"UNSHARDED(1)/BACKWARD_PRE", with(pre, {E::kUnshardDone})},
      {"SHARDED/BACKWARD_POST", with(post, {E::kReshard})},
      {"UNSHARDING(1)/BACKWARD_POST", post},
      {"UNSHARDED(1)/BACKWARD_POST", with(post, {E::kUnshardDone})},
      {"SHARDED/FULL_PARAMS", {E::kEnterFullParams}},
  };
}

Handle Make(const State& state) {
  Handle handle;
  for (E event : state.path) {
    const absl::Status status = handle.Apply(event, "g", 0);
    EXPECT_TRUE(status.ok()) << state.name << ": " << status;
  }
  EXPECT_EQ(handle.DebugString(), state.name);
  return handle;
}

// What must happen, written out by hand and by (storage, training): "-" is refused. Events in the order of kEvents:
// UnshardForward, UnshardBackward, UnshardDone, Reshard, SubmitGradients, BackwardDone, Step, EnterFullParams,
// LeaveFullParams, Abandon.
const std::map<std::string, std::vector<std::string>>& Oracle() {
  static const auto* const oracle = new std::map<std::string, std::vector<std::string>>{
      {"SHARDED/IDLE",
       {"UNSHARDING(1)/FORWARD", "UNSHARDING(1)/BACKWARD_PRE", "-", "-", "-", "SHARDED/IDLE", "SHARDED/IDLE",
        "SHARDED/FULL_PARAMS", "-", "SHARDED/IDLE"}},
      {"UNSHARDING(1)/IDLE",
       {"UNSHARDING(2)/FORWARD", "UNSHARDING(2)/BACKWARD_PRE", "UNSHARDED(1)/IDLE", "SHARDED/IDLE", "-",
        "UNSHARDING(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"UNSHARDED(1)/IDLE",
       {"UNSHARDED(2)/FORWARD", "UNSHARDED(2)/BACKWARD_PRE", "UNSHARDED(1)/IDLE", "SHARDED/IDLE", "-",
        "UNSHARDED(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"SHARDED/FORWARD",
       {"UNSHARDING(1)/FORWARD", "UNSHARDING(1)/BACKWARD_PRE", "-", "-", "SHARDED/BACKWARD_POST", "SHARDED/FORWARD",
        "SHARDED/IDLE", "SHARDED/FULL_PARAMS", "-", "SHARDED/IDLE"}},
      {"UNSHARDING(1)/FORWARD",
       {"UNSHARDING(2)/FORWARD", "UNSHARDING(2)/BACKWARD_PRE", "UNSHARDED(1)/FORWARD", "SHARDED/FORWARD",
        "UNSHARDING(1)/BACKWARD_POST", "UNSHARDING(1)/FORWARD", "-", "-", "-", "SHARDED/IDLE"}},
      {"UNSHARDED(1)/FORWARD",
       {"UNSHARDED(2)/FORWARD", "UNSHARDED(2)/BACKWARD_PRE", "UNSHARDED(1)/FORWARD", "SHARDED/FORWARD",
        "UNSHARDED(1)/BACKWARD_POST", "UNSHARDED(1)/FORWARD", "-", "-", "-", "SHARDED/IDLE"}},
      {"SHARDED/BACKWARD_PRE",
       {"UNSHARDING(1)/BACKWARD_PRE", "UNSHARDING(1)/BACKWARD_PRE", "-", "-", "SHARDED/BACKWARD_POST", "SHARDED/IDLE",
        "SHARDED/IDLE", "-", "-", "SHARDED/IDLE"}},
      {"UNSHARDING(1)/BACKWARD_PRE",
       {"UNSHARDING(2)/BACKWARD_PRE", "UNSHARDING(2)/BACKWARD_PRE", "UNSHARDED(1)/BACKWARD_PRE", "SHARDED/BACKWARD_PRE",
        "UNSHARDING(1)/BACKWARD_POST", "UNSHARDING(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"UNSHARDED(1)/BACKWARD_PRE",
       {"UNSHARDED(2)/BACKWARD_PRE", "UNSHARDED(2)/BACKWARD_PRE", "UNSHARDED(1)/BACKWARD_PRE", "SHARDED/BACKWARD_PRE",
        "UNSHARDED(1)/BACKWARD_POST", "UNSHARDED(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"SHARDED/BACKWARD_POST",
       {"UNSHARDING(1)/BACKWARD_POST", "UNSHARDING(1)/BACKWARD_PRE", "-", "-", "SHARDED/BACKWARD_POST", "SHARDED/IDLE",
        "SHARDED/IDLE", "SHARDED/FULL_PARAMS", "-", "SHARDED/IDLE"}},
      {"UNSHARDING(1)/BACKWARD_POST",
       {"UNSHARDING(2)/BACKWARD_POST", "UNSHARDING(2)/BACKWARD_PRE", "UNSHARDED(1)/BACKWARD_POST",
        "SHARDED/BACKWARD_POST", "UNSHARDING(1)/BACKWARD_POST", "UNSHARDING(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"UNSHARDED(1)/BACKWARD_POST",
       {"UNSHARDED(2)/BACKWARD_POST", "UNSHARDED(2)/BACKWARD_PRE", "UNSHARDED(1)/BACKWARD_POST",
        "SHARDED/BACKWARD_POST", "UNSHARDED(1)/BACKWARD_POST", "UNSHARDED(1)/IDLE", "-", "-", "-", "SHARDED/IDLE"}},
      {"SHARDED/FULL_PARAMS", {"-", "-", "-", "-", "-", "-", "-", "-", "SHARDED/IDLE", "-"}},
  };
  return *oracle;
}

TEST(Handle, EveryStateAndEventGoesWhereTheOracleSays) {
  for (const State& state : ReachableStates()) {
    const std::vector<std::string>& expected = Oracle().at(state.name);
    ASSERT_EQ(expected.size(), std::size(kEvents));
    for (size_t e = 0; e < std::size(kEvents); ++e) {
      Handle handle = Make(state);
      const absl::Status status = handle.Apply(kEvents[e], "layers.3", 2);
      const std::string label = absl::StrCat(state.name, " ", HandleEventName(kEvents[e]));
      if (expected[e] == "-") {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << label;
        EXPECT_EQ(handle.DebugString(), state.name) << label << ": a refused event must change nothing";
      } else {
        EXPECT_TRUE(status.ok()) << label << ": " << status;
        EXPECT_EQ(handle.DebugString(), expected[e]) << label;
      }
    }
  }
}

TEST(Handle, RandomWalksNeverLeaveTheStatesOfTheOracle) {
  // Users beyond one behave as one does, so "(n)" folds to "(1)".
  uint64_t random = 42;
  SCOPED_TRACE("seed 42");
  Handle handle;
  for (int i = 0; i < 200000; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    (void)handle.Apply(kEvents[(random >> 33) % std::size(kEvents)], "g", 0);
    ASSERT_EQ(handle.users() > 0, handle.storage() != S::kSharded) << handle.DebugString();
    std::string state(StorageStateName(handle.storage()));
    if (handle.users() > 0) {
      state += "(1)";
    }
    absl::StrAppend(&state, "/", TrainingStateName(handle.training()));
    ASSERT_TRUE(Oracle().count(state)) << state;
  }
}

TEST(Handle, OnlyTheLastReshardGivesTheMemoryBack) {
  Handle handle;
  ASSERT_TRUE(handle.Apply(E::kUnshardForward, "g", 0).ok());
  ASSERT_TRUE(handle.Apply(E::kUnshardDone, "g", 0).ok());
  ASSERT_TRUE(handle.Apply(E::kUnshardForward, "g", 0).ok());
  EXPECT_EQ(handle.storage(), S::kUnsharded) << "a second user reads what is there";
  ASSERT_TRUE(handle.Apply(E::kReshard, "g", 0).ok());
  EXPECT_EQ(handle.storage(), S::kUnsharded);
  ASSERT_TRUE(handle.Apply(E::kReshard, "g", 0).ok());
  EXPECT_EQ(handle.storage(), S::kSharded);
  EXPECT_EQ(handle.training(), T::kForward);
}

TEST(Handle, RefusalNamesCallGroupStateExpectedCallsAndRank) {
  Handle handle;
  const absl::Status status = handle.Apply(E::kReshard, "layers.3", 2);
  EXPECT_EQ(status.message(),
            "Reshard group \"layers.3\": not legal in SHARDED/IDLE (expected one of UnshardForward, UnshardBackward, "
            "BackwardDone, Step, EnterFullParams; rank=2)");
}

TEST(Handle, StepWhileUnshardedSaysToReshardFirst) {
  Handle handle;
  ASSERT_TRUE(handle.Apply(E::kUnshardForward, "g", 1).ok());
  const absl::Status status = handle.Apply(E::kStep, "g", 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("still unsharded"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("reshard it first"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("UNSHARDING(1)/FORWARD"));
}

TEST(Handle, EndlessUnshardsAreRefusedBeforeTheCountOverflows) {
  Handle handle;
  absl::Status status;
  int accepted = 0;
  while (status.ok() && accepted < 3'000'000) {
    status = handle.Apply(E::kUnshardForward, "g", 0);
    accepted += status.ok() ? 1 : 0;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(handle.users(), accepted);
}

TEST(Handle, AnUnknownEventIsRefused) {
  Handle handle;
  EXPECT_EQ(handle.Apply(static_cast<E>(99), "g", 0).code(), absl::StatusCode::kFailedPrecondition);
}

// The diagram must show what Apply does: every arrow between training states, no other.
TEST(HandleTable, MermaidDiagramHasExactlyTheTransitionsOfTheOracle) {
  std::map<std::string, bool> expected;
  const auto training = [](const std::string& state) { return state.substr(state.find('/') + 1); };
  for (const auto& [from, row] : Oracle()) {
    for (size_t e = 0; e < row.size(); ++e) {
      if (row[e] != "-" && training(row[e]) != training(from)) {
        expected[absl::StrCat("  ", training(from), " --> ", training(row[e]), ": ", HandleEventName(kEvents[e]))] =
            true;
      }
    }
  }
  const std::string diagram = HandleTableMermaid();
  size_t arrows = 0;
  for (size_t at = diagram.find("-->"); at != std::string::npos; at = diagram.find("-->", at + 1)) {
    ++arrows;
  }
  EXPECT_EQ(arrows, expected.size() + 1) << diagram;  // and [*] --> IDLE
  for (const auto& [line, unused] : expected) {
    EXPECT_THAT(diagram, HasSubstr(line + "\n"));
  }
}

// What people read is what the code does: the folder's README holds the diagram and the table as they are printed.
TEST(HandleTable, ReadmeShowsTheDiagramAndTheTableOfTheCode) {
  const std::string path = absl::StrCat(built::kSourceDir, "/common/handle/README.md");
  std::ifstream file(path);
  ASSERT_TRUE(file.is_open()) << path;
  std::ostringstream readme;
  readme << file.rdbuf();
  const std::string diagram = absl::StrCat("```mermaid\n", HandleTableMermaid(), "```\n");
  EXPECT_TRUE(absl::StrContains(readme.str(), diagram)) << path << " has another diagram; want:\n" << diagram;
  const std::string table = absl::StrCat("\n\n", HandleTableMarkdown());
  EXPECT_TRUE(absl::EndsWith(readme.str(), table)) << path << " has another table; want at its end:\n" << table;
}

TEST(HandleTable, MarkdownHasAReasonInEveryRow) {
  const std::string table = HandleTableMarkdown();
  EXPECT_THAT(table, HasSubstr("| LeaveFullParams | FULL_PARAMS |  | IDLE |"));
  EXPECT_EQ(table.find("|  |\n"), std::string::npos) << table;
}

}  // namespace
}  // namespace shardd
