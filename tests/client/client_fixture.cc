#include "tests/client/client_fixture.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd::testing_client {

Child SpawnProgram(const std::string& program, const std::vector<std::string>& environment, const std::string& log) {
  return testing::Spawn({"/proc/self/exe", "--program=" + program}, {.environment = environment, .log = log});
}

void Daemon::Restart() {
  daemon_.reset();
  daemon_ = std::make_unique<testing::DaemonProcess>(dir_.path(), absl::StrCat("cpu:", devices_));
  if (!daemon_->listened()) {
    ADD_FAILURE() << "the daemon does not listen; its log:\n" << ReadWholeFile(log());
  }
}

namespace {

template <typename Request, typename Response>
Response Ask(const std::string& address, const Request& request,
             grpc::Status (v1::JobsService::Stub::*call)(grpc::ClientContext*, const Request&, Response*)) {
  auto stub = v1::JobsService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kLimit));
  Response response;
  const grpc::Status status = ((*stub).*call)(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

}  // namespace

v1::Daemon GetDaemon(const std::string& address) {
  return Ask(address, v1::GetDaemonRequest(), &v1::JobsService::Stub::GetDaemon);
}

void CloseJob(const std::string& address, const std::string& job) {
  v1::JobRef reference;
  reference.set_job(job);
  EXPECT_TRUE(Ask(address, reference, &v1::JobsService::Stub::CloseJobByName).existed());
}

std::string LastCommand(const std::string& address, const std::string& job, int rank) {
  v1::JobRef reference;
  reference.set_job(job);
  const v1::ListRanksResponse ranks = Ask(address, reference, &v1::JobsService::Stub::ListRanks);
  return rank < ranks.ranks_size() ? ranks.ranks(rank).last_command() : "";
}

v1::JobSpec SmallSpec(const std::string& name, int world_size) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.set_world_size(world_size);
  spec.mutable_config()->set_trainers_never_write(true);
  spec.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  const auto add = [&spec](const std::string& module, int parent) {
    v1::Module* added = spec.mutable_tree()->add_modules();
    added->set_name(module);
    added->set_parent(parent);
    added->set_class_name(parent < 0 ? "Model" : "Block");
    return added;
  };
  const auto parameter = [](v1::Module* module, const std::string& name, std::vector<int64_t> shape) {
    v1::Parameter* added = module->add_parameters();
    added->set_name(name);
    added->set_dtype(v1::DTYPE_FLOAT32);
    added->set_requires_grad(true);
    for (const int64_t extent : shape) {
      added->add_shape(extent);
    }
    return added;
  };
  v1::Module* root = add("", -1);
  parameter(root, "head", {3, 5});
  parameter(root, "frozen", {7})->set_requires_grad(false);
  for (const char* name : {"a", "b"}) {
    v1::Module* block = add(name, 0);
    parameter(block, "weight", {33, 17});
    parameter(block, "bias", {33});
    block->set_mark(v1::MODULE_MARK_FULLY_SHARD);
  }
  return spec;
}

std::string ToJson(const v1::JobSpec& spec) {
  std::string json;
  EXPECT_TRUE(google::protobuf::util::MessageToJsonString(spec, &json).ok());
  return json;
}

Result::Result(shardd_status* status) : code_(shardd_status_code(status)), message_(shardd_status_message(status)) {
  shardd_status_free(status);
}
std::ostream& operator<<(std::ostream& out, const Result& result) {
  return out << "code " << result.code() << " \"" << result.message() << "\"";
}

Rank::~Rank() { shardd_status_free(shardd_detach(job_, 0)); }

shardd_job* Rank::Release() { return std::exchange(job_, nullptr); }

Result Rank::Attach(const std::string& address, const v1::JobSpec& spec, int rank, absl::Duration timeout,
                    bool replace) {
  const std::string json = ToJson(spec);
  shardd_attach_options options = {};
  options.struct_size = sizeof(options);
  options.spec_json = json.c_str();
  options.rank = rank;
  options.address = address.empty() ? nullptr : address.c_str();
  options.timeout_ms = absl::ToInt64Milliseconds(timeout);
  options.replace = replace ? 1 : 0;
  return shardd_attach(&options, &job_);
}

namespace {

template <typename Info, typename Call>
Info Get(Call call) {
  Info info = {};
  info.struct_size = sizeof(info);
  EXPECT_C_OK(call(&info));
  return info;
}

}  // namespace

shardd_job_info Rank::Info() const {
  return Get<shardd_job_info>([this](auto* info) { return shardd_get_job_info(job_, info); });
}
shardd_param_info Rank::ParamInfo(int param) const {
  return Get<shardd_param_info>([this, param](auto* info) { return shardd_get_param_info(job_, param, info); });
}
shardd_group_info Rank::GroupInfo(int group) const {
  return Get<shardd_group_info>([this, group](auto* info) { return shardd_get_group_info(job_, group, info); });
}
shardd_counters Rank::Counters() const {
  return Get<shardd_counters>([this](auto* counters) { return shardd_get_counters(job_, counters); });
}

void Rank::WriteAll(float value) {
  for (int param = 0; param < Info().param_count; ++param) {
    const std::vector<float> values(static_cast<size_t>(ParamInfo(param).numel), value);
    ASSERT_C_OK(shardd_write_parameter(job_, param, values.data(), 0, static_cast<int64_t>(values.size())));
  }
  ASSERT_C_OK(shardd_commit_parameters(job_));
}

void Rank::Unshard(int group, shardd_phase phase) {
  ASSERT_C_OK(shardd_unshard(job_, group, phase));
  ASSERT_C_OK(shardd_wait_unshard(job_, group));
}

float Rank::First(int param) const {
  const void* data = shardd_parameter_data(job_, param);
  return data == nullptr ? -12345.0f : *static_cast<const float*>(data);
}

void ForEachRank(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

World::World(const v1::JobSpec& spec) : daemon(spec.world_size()), ranks(static_cast<size_t>(spec.world_size())) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    EXPECT_C_OK(ranks[i].Attach(daemon.address(), spec, static_cast<int>(i)));
  }
}

void World::Each(const std::function<void(int, Rank&)>& body) {
  ForEachRank(static_cast<int>(ranks.size()), [&](int rank) { body(rank, ranks[static_cast<size_t>(rank)]); });
}

FilledWorld::FilledWorld(const v1::JobSpec& spec) : World(spec) {
  Each([](int, Rank& rank) { rank.WriteAll(1.0f); });
}

float* StoredShard(Rank& rank, int param) {
  return static_cast<float*>(const_cast<void*>(shardd_stored_parameter_data(rank.job(), param)));
}

shardd_shard_range RangeOf(const Rank& rank, int param) {
  shardd_shard_range range = {};
  range.struct_size = sizeof(range);
  EXPECT_C_OK(shardd_get_shard_range(rank.job(), param, &range));
  return range;
}

void FillGradients(Rank& rank, int group, float value) {
  const shardd_group_info info = rank.GroupInfo(group);
  for (int i = 0; i < info.param_count; ++i) {
    if (auto* slot = static_cast<float*>(shardd_gradient_data(rank.job(), info.params[i])); slot != nullptr) {
      std::fill_n(slot, rank.ParamInfo(info.params[i]).numel, value);
    }
  }
}

shardd_hyperparameters Sgd(double lr) {
  shardd_hyperparameters group = {};
  group.lr = lr;
  return group;
}

}  // namespace shardd::testing_client
