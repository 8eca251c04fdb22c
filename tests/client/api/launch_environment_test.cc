// Who this process is, by the variables of each launcher. What each sets is as its documents have it; see also
// client/docs/launching.md.

#include "client/c/api/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>
#include <utility>
#include <vector>

namespace shardd {
namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

// As `mpirun -n 6 --map-by ppr:3:node` has them on the second node.
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "4"},
                            {"OMPI_COMM_WORLD_SIZE", "6"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"OMPI_COMM_WORLD_NODE_RANK", "1"},  // not the node's number, whatever its name says
                            {"PMIX_RANK", "4"}};
// MPICH's Hydra, and Intel's.
const Variables kHydra = {
    {"PMI_RANK", "4"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}, {"PMI_FD", "9"}};
// `srun --ntasks=7 --nodes=3`: 3, 3 and 1.
const Variables kSrun = {
    {"SLURM_PROCID", "4"},         {"SLURM_NTASKS", "7"},   {"SLURM_STEP_NUM_TASKS", "7"},
    {"SLURM_LOCALID", "1"},        {"SLURM_NODEID", "1"},   {"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"},
    {"SLURM_STEP_NUM_NODES", "3"}, {"SLURM_JOB_ID", "100"}, {"SLURM_STEP_ID", "0"}};
// What a batch script itself has.
const Variables kBatch = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "7"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}};
const Variables kTorchrun = {{"RANK", "9"},       {"WORLD_SIZE", "12"},      {"LOCAL_RANK", "1"},
                             {"GROUP_RANK", "2"}, {"LOCAL_WORLD_SIZE", "4"}, {"GROUP_WORLD_SIZE", "3"}};

class LaunchEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const Variables* variables : {&kOpenMpi, &kHydra, &kSrun, &kTorchrun}) {
      for (const auto& [name, value] : *variables) unsetenv(name.c_str());
    }
    unsetenv("SHARDD_NODE");
    unsetenv("SHARDD_CONTROL");
  }
  void TearDown() override { SetUp(); }
  static void Set(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  // rank, world size, local rank, local world size, node
  static std::vector<int> Read() {
    const absl::StatusOr<LaunchEnvironment> read = ReadLaunchEnvironment();
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return {};
    return {read->rank, read->world_size, read->local_rank, read->local_world_size, read->node};
  }
};

TEST_F(LaunchEnvironmentTest, EachLauncherSaysWhoThisIs) {
  EXPECT_EQ(Read(), (std::vector<int>{-1, 0, -1, 0, -1}));
  Set(kTorchrun);
  EXPECT_EQ(Read(), (std::vector<int>{9, 12, 1, 4, 2}));
  SetUp();
  Set(kOpenMpi);
  EXPECT_EQ(Read(), (std::vector<int>{4, 6, 1, 3, 1}));
  SetUp();
  Set(kHydra);
  EXPECT_EQ(Read(), (std::vector<int>{4, 6, 1, 3, 1}));
  SetUp();
  Set(kSrun);
  EXPECT_EQ(Read(), (std::vector<int>{4, 7, 1, 3, 1}));
  Set({{"SLURM_PROCID", "6"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "2"}});
  EXPECT_EQ(Read(), (std::vector<int>{6, 7, 0, 1, 2}));
}

TEST_F(LaunchEnvironmentTest, OneLaunchersWordCounts) {
  Set(kSrun);
  Set(kOpenMpi);  // mpirun in an allocation: its own daemon is what srun has started
  EXPECT_EQ(Read(), (std::vector<int>{4, 6, 1, 3, 1}));
  setenv("RANK", "1", 1);  // by hand: nothing of the others is mixed in
  setenv("WORLD_SIZE", "2", 1);
  EXPECT_EQ(Read(), (std::vector<int>{1, 2, -1, 0, -1}));
}

TEST_F(LaunchEnvironmentTest, ABatchScriptIsNoRank) {
  Set(kBatch);
  EXPECT_EQ(Read(), (std::vector<int>{-1, 0, -1, 0, -1}));
}

TEST_F(LaunchEnvironmentTest, RanksThatGoRoundTheNodesNameNoNode) {
  Set(kOpenMpi);
  Set({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});  // 0, 2, 4 and 1, 3, 5
  EXPECT_EQ(Read(), (std::vector<int>{3, 6, 1, 3, -1}));
  setenv("SHARDD_NODE", "1", 1);
  EXPECT_EQ(Read(), (std::vector<int>{3, 6, 1, 3, 1}));
}

TEST_F(LaunchEnvironmentTest, WhatIsNoNumberIsNamed) {
  Set(kSrun);
  for (const char* text : {"3(xtwo),1", "many", "0"}) {
    setenv("SLURM_STEP_TASKS_PER_NODE", text, 1);
    const absl::StatusOr<LaunchEnvironment> read = ReadLaunchEnvironment();
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(read.status().message()), ::testing::HasSubstr("SLURM_STEP_TASKS_PER_NODE")) << text;
  }
  SetUp();
  Set(kHydra);
  setenv("PMI_RANK", "first", 1);
  EXPECT_THAT(std::string(ReadLaunchEnvironment().status().message()), ::testing::HasSubstr("PMI_RANK"));
}

TEST_F(LaunchEnvironmentTest, ControlIsByOneOfTwoWaysOrByEither) {
  EXPECT_EQ(ReadLaunchEnvironment()->control, Control::kAny);
  setenv("SHARDD_CONTROL", "ring", 1);
  EXPECT_EQ(ReadLaunchEnvironment()->control, Control::kRing);
  setenv("SHARDD_CONTROL", "grpc", 1);
  EXPECT_EQ(ReadLaunchEnvironment()->control, Control::kGrpc);
  setenv("SHARDD_CONTROL", "http", 1);
  EXPECT_EQ(ReadLaunchEnvironment().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ReadLaunchEnvironment().status().message()),
              ::testing::HasSubstr("SHARDD_CONTROL is no way to the daemon (got \"http\", want ring or grpc)"));
}

}  // namespace
}  // namespace shardd
