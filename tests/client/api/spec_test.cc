// What needs no daemon: specifications, the environment, plans as text, what a C caller can get wrong.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/c/shardd.h"
#include "nlohmann/json.hpp"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

class SpecTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDD_ADDRESS", "SHARDD_NODE", "GROUP_RANK"}) {
      unsetenv(name);
    }
  }
  void TearDown() override { SetUp(); }

  Result Plan(const std::string& json, nlohmann::json* plan = nullptr) {
    char* text = nullptr;
    Result result = shardd_plan_json(json.c_str(), &text);
    if (result.ok() && plan != nullptr) {
      *plan = nlohmann::json::parse(text);
    }
    shardd_string_free(text);
    return result;
  }

  Result Attach(shardd_attach_options options) {
    shardd_job* job = nullptr;
    Result result = shardd_attach(&options, &job);
    EXPECT_EQ(job, nullptr);
    return result;
  }

  shardd_attach_options Options() {
    shardd_attach_options options = {};
    options.struct_size = sizeof(options);
    options.spec_json = json_.c_str();
    options.address = "unix:/nonexistent/shardd.sock";
    return options;
  }

  v1::JobSpec SpecOnNodes(int count) {
    v1::JobSpec spec = SmallSpec("spec", 2);
    spec.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD);
    spec.mutable_config()->set_trainers_never_write(true);
    for (int node = 0; node < count; ++node) {
      spec.mutable_config()->mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7100"));
    }
    return spec;
  }

  const std::string json_ = ToJson(SmallSpec("spec", 2));
};

TEST_F(SpecTest, PlanJsonNamesGroupsParametersAndBytes) {
  nlohmann::json plan;
  ASSERT_C_OK(Plan(json_, &plan));
  EXPECT_EQ(plan["world_size"], 2);
  EXPECT_EQ(plan["strategy"], "full_shard");
  EXPECT_EQ(plan["groups"].size(), 3u);
  EXPECT_EQ(plan["groups"][0]["name"], "(root)");
  EXPECT_EQ(plan["groups"][1]["name"], "a");
  EXPECT_EQ(plan["groups"][1]["numel"], 33 * 17 + 33);
  EXPECT_EQ(plan["parameters"].size(), 6u);
  const int64_t numel = 15 + 7 + 2 * (33 * 17 + 33);
  EXPECT_GE(plan["bytes"]["shards"], 4 * numel);
  EXPECT_GE(plan["bytes"]["total"], plan["bytes"]["shards"]);
  bool found = false;
  for (const auto& parameter : plan["parameters"]) {
    if (parameter["fqn"] == "b.weight") {
      found = true;
      EXPECT_EQ(parameter["shape"], (std::vector<int>{33, 17}));
      EXPECT_EQ(parameter["group"], "b");
      EXPECT_EQ(parameter["dtype"], "float32");
    }
  }
  EXPECT_TRUE(found);
}

TEST_F(SpecTest, InvalidSpecJsonIsRefusedWithTheParsersText) {
  EXPECT_C_ERROR(Plan("{\"name\": "), kInvalidArgument, "parse spec_json");
  EXPECT_C_ERROR(Plan("{\"nmae\": \"x\"}"), kInvalidArgument, "nmae");
  EXPECT_C_ERROR(Plan("{\"config\": {\"strategy\": \"FULL\"}}"), kInvalidArgument, "FULL");
  EXPECT_C_ERROR(Plan(""), kInvalidArgument, "empty");
  EXPECT_C_ERROR(shardd_plan_json(nullptr, nullptr), kInvalidArgument, "NULL");
}

TEST_F(SpecTest, WorldSizeDefaultsToThatOfTheEnvironment) {
  const std::string json = ToJson(SmallSpec("spec", 0));
  EXPECT_C_ERROR(Plan(json), kInvalidArgument, "WORLD_SIZE");
  setenv("WORLD_SIZE", "5", 1);
  nlohmann::json plan;
  ASSERT_C_OK(Plan(json, &plan));
  EXPECT_EQ(plan["world_size"], 5);
  setenv("WORLD_SIZE", "many", 1);
  EXPECT_C_ERROR(Plan(json), kInvalidArgument, "WORLD_SIZE is out of range (got \"many\"");
}

TEST_F(SpecTest, ARankIsNeededFromOptionsOrEnvironment) {
  shardd_attach_options options = Options();
  options.rank = -1;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "RANK");
  setenv("RANK", "7", 1);
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "rank is out of range (got 7, want 0 to 1)");
  setenv("RANK", "-3", 1);
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "RANK is out of range");
}

TEST_F(SpecTest, ANodeIsOneOfTheSpecs) {
  shardd_attach_options options = Options();
  options.node = 1;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "node is out of range (got 1, want 0 to 0, of 0 in config.nodes)");
  options.node = -1;  // there are none: what the environment says is of others
  setenv("SHARDD_NODE", "7", 1);
  EXPECT_C_ERROR(Attach(options), kUnavailable, "/nonexistent");
  unsetenv("SHARDD_NODE");

  const std::string json = ToJson(SpecOnNodes(2));
  options.spec_json = json.c_str();
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "got node -1 and neither SHARDD_NODE nor GROUP_RANK");
  setenv("GROUP_RANK", "2", 1);
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "node is out of range (got 2, want 0 to 1, of 2 in config.nodes)");
  setenv("SHARDD_NODE", "1", 1);
  EXPECT_C_ERROR(Attach(options), kUnavailable, "/nonexistent");
  setenv("SHARDD_NODE", "one", 1);
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "SHARDD_NODE is out of range (got \"one\"");
  unsetenv("SHARDD_NODE");
  options.node = -2;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "node is out of range (got -2, want 0 to 1");
  options.node = 2;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "node is out of range (got 2, want 0 to 1");
}

TEST_F(SpecTest, OnSeveralNodesLocalRankAndLocalWorldSizeCount) {
  setenv("RANK", "5", 1);
  setenv("WORLD_SIZE", "6", 1);
  v1::JobSpec spec = SpecOnNodes(2);
  spec.set_world_size(0);
  const std::string json = ToJson(spec);
  EXPECT_C_ERROR(Plan(json), kInvalidArgument, "no LOCAL_WORLD_SIZE");
  setenv("LOCAL_WORLD_SIZE", "3", 1);
  nlohmann::json plan;
  ASSERT_C_OK(Plan(json, &plan));
  EXPECT_EQ(plan["world_size"], 3);
  shardd_attach_options options = Options();
  options.spec_json = json.c_str();
  options.rank = -1;
  options.node = 1;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "got rank -1 and no LOCAL_RANK");
  setenv("LOCAL_RANK", "2", 1);
  EXPECT_C_ERROR(Attach(options), kUnavailable, "/nonexistent");
  setenv("LOCAL_RANK", "3", 1);
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "rank is out of range (got 3, want 0 to 2)");
}

TEST_F(SpecTest, ADaemonIsDescribedAndNoneIsStartedForIt) {
  char* text = nullptr;
  EXPECT_C_ERROR(shardd_describe_daemon("unix:/nonexistent/shardd.sock", 0, &text), kUnavailable, "/nonexistent");
  EXPECT_C_ERROR(shardd_describe_daemon("tcp:1.2.3.4:5", 0, &text), kInvalidArgument, "1.2.3.4");
  EXPECT_C_ERROR(shardd_describe_daemon(nullptr, -1, &text), kInvalidArgument, "timeout_ms is out of range");
  EXPECT_C_ERROR(shardd_describe_daemon(nullptr, 0, nullptr), kInvalidArgument, "NULL");
  EXPECT_EQ(text, nullptr);
  Daemon daemon;
  ASSERT_C_OK(shardd_describe_daemon(daemon.address().c_str(), 0, &text));
  const auto told = nlohmann::json::parse(text);
  shardd_string_free(text);
  EXPECT_EQ(told["version"], shardd_version());
  EXPECT_EQ(told["peer_address"], "");
}

TEST_F(SpecTest, NobodyAtTheGivenAddressIsSaidAtOnce) {
  const absl::Time start = absl::Now();
  EXPECT_C_ERROR(Attach(Options()), kUnavailable, "/nonexistent/shardd.sock");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  shardd_attach_options options = Options();
  options.address = nullptr;
  setenv("SHARDD_ADDRESS", "unix:/elsewhere/shardd.sock", 1);
  EXPECT_C_ERROR(Attach(options), kUnavailable, "/elsewhere/shardd.sock");
  options.address = "tcp:1.2.3.4:5";
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "1.2.3.4");
}

TEST_F(SpecTest, StructSizesAndNullsAreChecked) {
  shardd_attach_options options = Options();
  options.struct_size = 0;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "struct_size");
  EXPECT_C_ERROR(shardd_attach(nullptr, nullptr), kInvalidArgument, "NULL");
  shardd_job* job = nullptr;
  EXPECT_C_ERROR(shardd_attach(nullptr, &job), kInvalidArgument, "NULL");
  options = Options();
  options.spec_json = nullptr;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "empty");
  options = Options();
  options.timeout_ms = -1;
  EXPECT_C_ERROR(Attach(options), kInvalidArgument, "timeout_ms");
  EXPECT_C_ERROR(shardd_unshard(nullptr, 0, SHARDD_FORWARD), kInvalidArgument, "NULL");
  EXPECT_C_ERROR(shardd_step(nullptr, nullptr, 0, 0, nullptr, 0), kInvalidArgument, "NULL");
  EXPECT_EQ(shardd_parameter_data(nullptr, 0), nullptr);
  EXPECT_EQ(shardd_find_param(nullptr, "x"), -1);
  EXPECT_EQ(shardd_detach(nullptr, 1), nullptr);
}

TEST_F(SpecTest, OptionsOfLaterVersionsAreRefusedWhereSet) {
  struct Later {
    shardd_attach_options options;
    int64_t unknown;
  } later = {Options(), 0};
  later.options.struct_size = sizeof(later);
  shardd_job* job = nullptr;
  EXPECT_C_ERROR(shardd_attach(&later.options, &job), kUnavailable, "/nonexistent");
  later.unknown = 1;
  EXPECT_C_ERROR(shardd_attach(&later.options, &job), kUnimplemented, "newer version");
}

}  // namespace
}  // namespace shardd::testing_client
