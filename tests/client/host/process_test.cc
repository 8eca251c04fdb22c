// The library in a process that forks, or exits without a word.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>

#include "absl/time/clock.h"
#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"
#include "tests/testing/build_paths.h"

namespace shardd::testing_client {
namespace {

template <typename Struct>
Struct Sized() {
  Struct value = {};
  value.struct_size = sizeof(value);
  return value;
}

// What the header declares.
std::set<std::string> DeclaredFunctions() {
  const std::string header = ReadWholeFile(built::kSourceDir + "/client/c/shardd.h");
  const std::regex function("SHARDD_API [^;(]*?(shardd_[a-z_0-9]+)\\(");
  std::set<std::string> names;
  for (std::sregex_iterator it(header.begin(), header.end(), function), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

TEST(Process, EveryCallInAForkedChildIsRefused) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  rank.Unshard(0, SHARDD_FORWARD);
  shardd_job* job = rank.job();
  const auto refused = [](shardd_status* status) {
    const Result result = status;
    return result.code() == kFailedPrecondition && result.message().find("forked child") != std::string::npos;
  };
  const shardd_hyperparameters sgd = Sgd(0.5);
  const float value = 1;
  int32_t has_edits = 0;
  char* text = nullptr;
  size_t size = 1;
  auto job_info = Sized<shardd_job_info>();
  auto group_info = Sized<shardd_group_info>();
  auto param_info = Sized<shardd_param_info>();
  auto flat_info = Sized<shardd_flat_param_info>();
  int32_t pieces = 0;
  auto shard_info = Sized<shardd_shard_info>();
  auto shard_range = Sized<shardd_shard_range>();
  auto step_options = Sized<shardd_step_options>();
  auto step_result = Sized<shardd_step_result>();
  auto counters = Sized<shardd_counters>();
  int32_t graph = 0;
  const int32_t* given = nullptr;
  int32_t given_count = 0;
  const int group = rank.Group("a");
  const int param = rank.Param("a.weight");
  const int unsharded = rank.GroupInfo(0).params[0];
  ASSERT_NE(shardd_parameter_data(job, unsharded), nullptr);
  const std::string json = ToJson(SmallSpec("other", 1));
  const std::string address = daemon.address();
  const std::map<std::string, std::function<bool()>> calls = {
      {"shardd_attach",
       [&] {
         shardd_attach_options options = {};
         options.struct_size = sizeof(options);
         options.spec_json = json.c_str();
         options.address = address.c_str();
         shardd_job* other = nullptr;
         return refused(shardd_attach(&options, &other)) && other == nullptr;
       }},
      {"shardd_reattach", [&] { return refused(shardd_reattach(job)); }},
      {"shardd_extend_job",
       [&] {
         int32_t extended = 1;
         return refused(shardd_extend_job(job, json.c_str(), &extended)) && extended == 0;
       }},
      {"shardd_detach", [&] { return refused(shardd_detach(job, 1)); }},
      {"shardd_get_job_info", [&] { return refused(shardd_get_job_info(job, &job_info)); }},
      {"shardd_trainer_state", [&] { return shardd_trainer_state(job, &size) == nullptr && size == 0; }},
      {"shardd_get_group_info", [&] { return refused(shardd_get_group_info(job, group, &group_info)); }},
      {"shardd_get_shard_info", [&] { return refused(shardd_get_shard_info(job, &shard_info)); }},
      {"shardd_get_shard_range", [&] { return refused(shardd_get_shard_range(job, param, &shard_range)); }},
      {"shardd_get_param_info", [&] { return refused(shardd_get_param_info(job, param, &param_info)); }},
      {"shardd_get_flat_param_info", [&] { return refused(shardd_get_flat_param_info(job, 0, &flat_info)); }},
      {"shardd_get_shard_pieces",
       [&] { return refused(shardd_get_shard_pieces(job, 0, 0, nullptr, 0, &pieces, nullptr)); }},
      {"shardd_find_param", [&] { return shardd_find_param(job, "a.weight") == -1; }},
      {"shardd_find_group", [&] { return shardd_find_group(job, "a") == -1; }},
      {"shardd_write_parameter", [&] { return refused(shardd_write_parameter(job, param, &value, 0, 1)); }},
      {"shardd_commit_parameters", [&] { return refused(shardd_commit_parameters(job)); }},
      {"shardd_unshard", [&] { return refused(shardd_unshard(job, group, SHARDD_FORWARD)); }},
      {"shardd_wait_unshard", [&] { return refused(shardd_wait_unshard(job, 0)); }},
      {"shardd_parameter_data", [&] { return shardd_parameter_data(job, unsharded) == nullptr; }},
      {"shardd_reshard", [&] { return refused(shardd_reshard(job, 0)); }},
      {"shardd_wait_gradient_slot", [&] { return refused(shardd_wait_gradient_slot(job, group)); }},
      {"shardd_gradient_data", [&] { return shardd_gradient_data(job, param) == nullptr; }},
      {"shardd_submit_gradients", [&] { return refused(shardd_submit_gradients(job, group, nullptr, nullptr)); }},
      {"shardd_backward_done", [&] { return refused(shardd_backward_done(job, 1)); }},
      {"shardd_stored_parameter_data", [&] { return shardd_stored_parameter_data(job, param) == nullptr; }},
      {"shardd_gradient_shard_data", [&] { return shardd_gradient_shard_data(job, param) == nullptr; }},
      {"shardd_wait_gradients", [&] { return refused(shardd_wait_gradients(job)); }},
      {"shardd_given_by_others", [&] { return refused(shardd_given_by_others(job, &given, &given_count)); }},
      {"shardd_set_interrupt", [&] { return refused(shardd_set_interrupt(job, nullptr, nullptr)); }},
      {"shardd_step", [&] { return refused(shardd_step(job, &sgd, 1, 0, nullptr, 0)); }},
      {"shardd_step_with", [&] { return refused(shardd_step_with(job, &step_options)); }},
      {"shardd_await_step", [&] { return refused(shardd_await_step(job)); }},
      {"shardd_wait_step", [&] { return refused(shardd_wait_step(job, &step_result)); }},
      {"shardd_enter_pass", [&] { return refused(shardd_enter_pass(job, 0, nullptr, 0)); }},
      {"shardd_enter_full_params_with", [&] { return refused(shardd_enter_full_params_with(job, nullptr)); }},
      {"shardd_full_gradient_data", [&] { return shardd_full_gradient_data(job, 0) == nullptr; }},
      {"shardd_write_gradient", [&] { return refused(shardd_write_gradient(job, 0, nullptr, 0, 0)); }},
      {"shardd_abandon_backward", [&] { return refused(shardd_abandon_backward(job)); }},
      {"shardd_give_back_gradient", [&] { return refused(shardd_give_back_gradient(job, 0)); }},
      {"shardd_set_cuda_stream", [&] { return refused(shardd_set_cuda_stream(job, nullptr)); }},
      {"shardd_clear_cuda_stream", [&] { return refused(shardd_clear_cuda_stream(job)); }},
      {"shardd_begin_graph", [&] { return refused(shardd_begin_graph(job, &graph)); }},
      {"shardd_end_graph", [&] { return refused(shardd_end_graph(job)); }},
      {"shardd_launch_graph", [&] { return refused(shardd_launch_graph(job, 0, &graph)); }},
      {"shardd_free_graph", [&] { return refused(shardd_free_graph(job, 0)); }},
      {"shardd_set_gradient_presence", [&] { return refused(shardd_set_gradient_presence(job, 0, 1)); }},
      {"shardd_stop_reading", [&] { return refused(shardd_stop_reading(job)); }},
      {"shardd_resume_reading", [&] { return refused(shardd_resume_reading(job)); }},
      {"shardd_inside_pass", [&] { return shardd_inside_pass(job) == 0; }},
      {"shardd_write_optimizer_state",
       [&] { return refused(shardd_write_optimizer_state(job, param, 0, &value, 0, 1)); }},
      {"shardd_write_update_count", [&] { return refused(shardd_write_update_count(job, param, 1)); }},
      {"shardd_leave_pass", [&] { return refused(shardd_leave_pass(job)); }},
      {"shardd_has_edits", [&] { return refused(shardd_has_edits(job, &has_edits)); }},
      {"shardd_hand_in_edits", [&] { return refused(shardd_hand_in_edits(job)); }},
      {"shardd_await_store", [&] { return refused(shardd_await_store(job)); }},
      {"shardd_watch_writes", [&] { return refused(shardd_watch_writes(job, 1)); }},
      {"shardd_optimizer_state_data", [&] { return shardd_optimizer_state_data(job, param, 0) == nullptr; }},
      {"shardd_enter_full_params", [&] { return refused(shardd_enter_full_params(job, 0)); }},
      {"shardd_full_parameter_data", [&] { return shardd_full_parameter_data(job, param) == nullptr; }},
      {"shardd_leave_full_params", [&] { return refused(shardd_leave_full_params(job)); }},
      {"shardd_plan_json", [&] { return refused(shardd_plan_json(json.c_str(), &text)) && text == nullptr; }},
      {"shardd_describe_daemon",
       [&] { return refused(shardd_describe_daemon(address.c_str(), 0, &text)) && text == nullptr; }},
      {"shardd_describe_job", [&] { return refused(shardd_describe_job(job, &text)) && text == nullptr; }},
      {"shardd_get_counters", [&] { return refused(shardd_get_counters(job, &counters)); }},
  };
  // Those touch nothing but what they are given.
  const std::set<std::string> harmless = {"shardd_status_code", "shardd_status_message", "shardd_status_free",
                                          "shardd_version", "shardd_string_free"};
  for (const std::string& name : DeclaredFunctions()) {
    EXPECT_TRUE(calls.count(name) > 0 || harmless.count(name) > 0) << name << " is declared and not tried here";
  }

  int answer[2];
  ASSERT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, call] : calls) {
      if (!call()) {
        (void)!write(answer[1], (name + " ").data(), name.size() + 1);
      }
    }
    (void)!write(answer[1], ".", 1);
    _exit(0);
  }
  close(answer[1]);
  std::string answered;
  char buffer[256];
  for (ssize_t got = 0; (got = read(answer[0], buffer, sizeof(buffer))) > 0;) {
    answered.append(buffer, static_cast<size_t>(got));
  }
  close(answer[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(answered, ".") << "these went through in the child";
  // The parent's session has not noticed, and each of them works there.
  EXPECT_NE(shardd_find_param(job, "a.weight"), -1);
  EXPECT_C_OK(shardd_reshard(rank.job(), 0));
  rank.Unshard(1, SHARDD_FORWARD);
}

TEST(Process, AForkedChildThatExitsLeavesTheSessionAlone) {
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      exit(0);  // with exit handlers and static destructors, as a worker process of a data loader ends
    }
    int status = 0;
    ASSERT_TRUE(Eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  rank.Unshard(0, SHARDD_FORWARD);
  EXPECT_EQ(rank.Info().epoch, 1u);
}

class ExitPrograms : public ::testing::TestWithParam<const char*> {};

TEST_P(ExitPrograms, ExitWithoutDetachIsPromptAndClean) {
  Daemon daemon;
  for (int round = 0; round < 10; ++round) {
    const absl::Time start = absl::Now();
    Child process = SpawnProgram(GetParam(), {"TEST_WORLD=1", "TEST_RANK=0", "TEST_ADDRESS=" + daemon.address()});
    EXPECT_EQ(process.Wait(), 0);
    // gRPC's shutdown would take 10 s once in a while.
    EXPECT_LT(absl::Now() - start, absl::Seconds(8));
  }
}
INSTANTIATE_TEST_SUITE_P(All, ExitPrograms, ::testing::Values("exit_attached", "exit_with_static_job"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shardd::testing_client
