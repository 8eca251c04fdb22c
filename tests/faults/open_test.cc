// Jobs as no trainer should describe them.

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status/grpc_status.h"
#include "common/versions/versions.h"
#include "tests/faults/bad_input.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMaxMessageBytes = 256 << 20;  // of the daemon's gRPC server

TEST_F(BadInput, ClientAndDaemonOfDifferentVersionsAreToldSo) {
  StartDaemonWithJob();
  v1::OpenJobRequest request;
  request.set_protocol_version(kProtocolVersions.newest + 1);
  *request.mutable_spec() = SpecOf(job_);
  RawClient client(socket());
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition,
               absl::StrCat("no common protocol version (got ", kProtocolVersions.newest + 1, ", want ",
                            kProtocolVersions.Text(), "); upgrade this daemon"));
  request.set_newest_protocol_version(kProtocolVersions.newest);
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kInvalidArgument, "no range of protocol versions");
  request.set_protocol_version(0);  // does not say it
  request.set_newest_protocol_version(0);
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "; upgrade the client");
  request.set_protocol_version(kProtocolVersions.newest);
  request.set_plan_digest(std::string(32, 'x'));
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "plan differently");
  ExpectJobIntact();
}

// The newest that both speak, which the session keeps; a client that says nothing of it is of the version that had
// none.
TEST_F(BadInput, ARankSpeaksTheNewestCommonVersion) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    v1::OpenJobRequest request;
    request.set_protocol_version(kProtocolVersions.oldest - 1);
    request.set_newest_protocol_version(kProtocolVersions.newest + 7);
    *request.mutable_spec() = SpecOf(job_);
    const absl::StatusOr<v1::OpenJobResponse> opened = client.Open(request);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->protocol_version(), kProtocolVersions.newest);
    v1::AttachRankRequest attach;
    attach.set_job_id(opened->job_id());
    attach.set_protocol_version(kProtocolVersions.newest + 1);
    grpc::ClientContext refused, served;
    v1::AttachRankResponse session;
    ExpectStatus(FromGrpcStatus(client.stub().AttachRank(&refused, attach, &session)),
                 absl::StatusCode::kFailedPrecondition, "a protocol version that this daemon does not speak");
    attach.clear_protocol_version();
    ASSERT_TRUE(client.stub().AttachRank(&served, attach, &session).ok());
    EXPECT_EQ(Ranks()[0].protocol_version(), kUnsaidProtocolVersion);
    RawStream stream(client.stub());
    stream.Hello(session.session_id(), session.token());
    EXPECT_EQ(stream.Read().kind_case(), v1::SessionEvent::kAttached);
  }
  ExpectJobIntact();
}

TEST_F(BadInput, RefusalOfADifferentJobNamesTheFirstDifference) {
  StartDaemonWithJob();
  RawClient client(socket());
  v1::JobSpec spec = SpecOf(job_);
  spec.set_world_size(2);
  ExpectStatus(client.Open(spec).status(), absl::StatusCode::kFailedPrecondition, "(got 2, want 1)");
  spec = SpecOf(job_);
  spec.mutable_tree()->mutable_modules(2)->mutable_parameters(1)->set_shape(0, 14);
  ExpectStatus(client.Open(spec).status(), absl::StatusCode::kFailedPrecondition, "\"mid.b1\"");
  spec = SpecOf(job_);
  spec.mutable_config()->set_layout(v1::LAYOUT_DIM0);
  ExpectStatus(client.Open(spec).status(), absl::StatusCode::kFailedPrecondition, "LAYOUT_DIM0");
  spec = SpecOf(job_);
  spec.mutable_tree()->mutable_modules(2)->mutable_parameters(0)->set_requires_grad(false);
  ExpectStatus(client.Open(spec).status(), absl::StatusCode::kFailedPrecondition, "\"mid.w1\"");
  ExpectJobIntact();
}

TEST_F(BadInput, OnlyAWiderJobIsAdoptedAndOnlyOnRequest) {
  StartDaemonWithJob();
  RawClient client(socket());
  v1::OpenJobRequest request;
  request.set_protocol_version(kProtocolVersions.newest);
  request.set_adopt(true);
  *request.mutable_spec() = SpecOf(job_);
  EXPECT_FALSE(client.Open(request)->has_spec());
  v1::Parameter& param = *request.mutable_spec()->mutable_tree()->mutable_modules(2)->mutable_parameters(0);
  param.set_requires_grad(false);
  const absl::StatusOr<v1::OpenJobResponse> opened = client.Open(request);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->spec().SerializeAsString(), SpecOf(job_).SerializeAsString());
  request.set_adopt(false);
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "\"mid.w1\"");
  request.set_adopt(true);
  param.set_shape(0, 14);
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "\"mid.w1\"");
  ExpectJobIntact();
}

TEST_F(BadInput, OnlyAnAttachedRankAsksWhatOthersGave) {
  StartDaemonWithJob();
  RawClient client(socket());
  ASSERT_TRUE(client.Enter(SpecOf({{"name", "other"}, {"world", "1"}}), 0).ok());
  const auto ask = [&](uint64_t session_id, const std::string& token, uint64_t since) {
    v1::OthersGradientsRequest request;
    request.set_session_id(session_id);
    request.set_token(token);
    request.set_since(since);
    v1::OthersGradientsResponse response;
    grpc::ClientContext context;
    const absl::Status status = FromGrpcStatus(client.stub().OthersGradients(&context, request, &response));
    EXPECT_EQ(response.params_size(), 0);
    return status;
  };
  const uint64_t session = client.session().session_id();
  const std::string& token = client.session().token();
  ExpectStatus(ask(session + 1000, token, 0), absl::StatusCode::kUnauthenticated, "no such session");
  ExpectStatus(ask(session, "guess", 0), absl::StatusCode::kUnauthenticated, "wrong token");
  EXPECT_TRUE(ask(session, token, 0).ok());
  EXPECT_TRUE(ask(session, token, std::numeric_limits<uint64_t>::max()).ok()) << "more than it can have closed";
  ExpectJobIntact();
}

// Each answer may be large, and waits in the daemon until it is read.
TEST_F(BadInput, QuestionsWithoutEndAreFewAtATime) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf({{"name", "other"}, {"world", "1"}}), 0).ok());
    v1::OthersGradientsRequest request;
    request.set_session_id(client.session().session_id());
    request.set_token(client.session().token());
    struct Call {
      grpc::ClientContext context;
      v1::OthersGradientsResponse response;
      grpc::Status status;
    };
    constexpr int kCalls = 2000;
    std::vector<Call> calls(kCalls);
    grpc::CompletionQueue queue;
    for (Call& call : calls) {
      call.context.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit));
      client.stub().AsyncOthersGradients(&call.context, request, &queue)->Finish(&call.response, &call.status, &call);
    }
    int answered = 0, refused = 0;
    for (int i = 0; i < kCalls; ++i) {
      void* tag = nullptr;
      bool ok = false;
      ASSERT_TRUE(queue.Next(&tag, &ok));
      const grpc::Status& status = static_cast<Call*>(tag)->status;
      answered += status.ok() ? 1 : 0;
      if (status.ok()) continue;
      ExpectStatus(FromGrpcStatus(status), absl::StatusCode::kResourceExhausted, "too many questions are under way");
      ++refused;
    }
    EXPECT_GT(answered, 0);
    EXPECT_GT(refused, 0);
    v1::OthersGradientsResponse response;
    EXPECT_TRUE(testing::PollUntil([&] {
      grpc::ClientContext context;
      return client.stub().OthersGradients(&context, request, &response).ok();
    })) << "when answers are read";
    queue.Shutdown();
  }
  ExpectJobIntact();
}

TEST_F(BadInput, OnlyAnAttachedRankExtendsWhatItsJobTrains) {
  StartDaemonWithJob();
  RawClient client(socket());
  v1::JobSpec spec = SpecOf({{"name", "other"}, {"world", "1"}});
  ASSERT_TRUE(client.Enter(spec, 0).ok());
  const auto extend = [&](uint64_t session_id, const std::string& token, const v1::JobSpec& to) {
    v1::ExtendJobRequest request;
    request.set_session_id(session_id);
    request.set_token(token);
    *request.mutable_spec() = to;
    v1::ExtendJobResponse response;
    grpc::ClientContext context;
    return FromGrpcStatus(client.stub().ExtendJob(&context, request, &response));
  };
  const uint64_t session = client.session().session_id();
  const std::string& token = client.session().token();
  ExpectStatus(extend(session + 1000, token, spec), absl::StatusCode::kUnauthenticated, "no such session");
  ExpectStatus(extend(session, "guess", spec), absl::StatusCode::kUnauthenticated, "wrong token");
  EXPECT_TRUE(extend(session, token, spec).ok()) << "it is that already";
  v1::JobSpec wider = spec;
  wider.mutable_tree()->mutable_modules(2)->mutable_parameters(2)->set_requires_grad(true);
  ExpectStatus(extend(session, token, wider), absl::StatusCode::kFailedPrecondition, "no parameters yet");
  wider.mutable_tree()->mutable_modules(2)->mutable_parameters(1)->set_shape(0, 14);
  ExpectStatus(extend(session, token, wider), absl::StatusCode::kFailedPrecondition, "\"mid.b1\": shape differs");
  wider.mutable_tree()->mutable_modules(2)->mutable_parameters(1)->set_shape(0, -1);
  ExpectStatus(extend(session, token, wider), absl::StatusCode::kInvalidArgument, "\"mid.b1\"");
  ExpectJobIntact();
}

// Told from its length alone; none of it is kept.
TEST_F(BadInput, AMessageAboveTheLimitIsRefused) {
  StartDaemonWithJob();
  v1::JobSpec spec = SpecOf({{"name", "oversized"}, {"world", "1"}});
  spec.mutable_tree()->mutable_modules(0)->set_class_name(std::string(kMaxMessageBytes + 1, 'x'));
  RawClient client(socket());
  ExpectStatus(client.Open(spec).status(), absl::StatusCode::kResourceExhausted, "larger than max");
  EXPECT_TRUE(Job("oversized").name().empty());
  ExpectJobIntact();
}

// Two bytes of a message may take a hundred in memory: what it has is counted before it is decoded.
TEST_F(BadInput, CountlessEmptyParametersAreRefusedBeforeDecoding) {
  constexpr int kParameters = 16 << 20;
  // Nothing near the 1.4 GiB that so many take; the message itself comes in several shapes.
  constexpr int64_t kMostBytes = 256 << 20;
  const auto field = [](int number, const std::string& bytes) {
    std::string text(1, static_cast<char>(number << 3 | 2));
    for (size_t left = bytes.size(); left > 0; left >>= 7) {
      text += static_cast<char>((left & 127) | (left > 127 ? 128 : 0));
    }
    return text + bytes;
  };
  std::string parameters(2 * kParameters, '\0');
  for (int i = 0; i < kParameters; ++i) parameters[2 * i] = v1::Module::kParametersFieldNumber << 3 | 2;
  const std::string tree = field(v1::ModuleTree::kModulesFieldNumber, parameters);
  const std::string message = field(v1::OpenJobRequest::kSpecFieldNumber, field(v1::JobSpec::kTreeFieldNumber, tree));
  StartDaemonWithJob();
  {
    RawClient client(socket());
    const int64_t before = ResidentBytes();
    ExpectStatus(client.Call("/shardd.v1.TrainerService/OpenJob", message), absl::StatusCode::kResourceExhausted,
                 "too many elements");
    EXPECT_LT(ResidentBytes() - before, kMostBytes);  // what was once taken is seldom given back
    // Where a name is expected, much less is read.
    for (const char* method : {"TrainerService/AttachRank", "TrainerService/CloseJob", "JobsService/GetDaemon",
                               "JobsService/ListRanks", "JobsService/ListEvents", "JobsService/CloseJobByName"}) {
      ExpectStatus(client.Call(absl::StrCat("/shardd.v1.", method), message), absl::StatusCode::kResourceExhausted,
                   "message is too large");
      ExpectStatus(client.Call(absl::StrCat("/shardd.v1.", method), "\x0a\x7f"), absl::StatusCode::kInvalidArgument,
                   "message is not a shardd.v1.");
    }
  }
  ExpectJobIntact();
}

struct HostileSpec {
  const char* name;
  std::function<void(v1::JobSpec&)> change;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};
std::ostream& operator<<(std::ostream& out, const HostileSpec& spec) { return out << spec.name; }

class HostileOpen : public BadInput, public ::testing::WithParamInterface<HostileSpec> {};

TEST_P(HostileOpen, IsRefusedAndLeavesNothing) {
  StartDaemonWithJob();
  const e2e::Footprint before = DaemonFootprint();
  v1::JobSpec spec = SpecOf({{"name", "hostile"}, {"world", "2"}});
  GetParam().change(spec);
  RawClient client(socket());
  const absl::Status status = client.Open(spec).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_LT(status.message().size(), 4096u);
  EXPECT_TRUE(Job("hostile").name().empty());
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  ExpectJobIntact();
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    Specs, HostileOpen,
    ::testing::Values(
        HostileSpec{"NegativeExtent", [](auto& s) { SetShape(s, {-3}); }},
        HostileSpec{"ZeroExtent",
                    [](auto& s) {
                      SetShape(s, {3, 0});
                    }},
        HostileSpec{"ProductOverflows",
                    [](auto& s) {
                      SetShape(s, {int64_t{1} << 32, int64_t{1} << 32});
                    }},
        HostileSpec{"LargestExtent", [](auto& s) { SetShape(s, {kMost}); }},
        HostileSpec{"ProductOverflowsToSmall",
                    [](auto& s) {
                      SetShape(s, {int64_t{1} << 62, 4, 3});
                    }},
        HostileSpec{"MoreThanTheMachineHas", [](auto& s) { SetShape(s, {int64_t{1} << 40}); },
                    absl::StatusCode::kResourceExhausted},
        HostileSpec{"MoreThanAMillionParameters", [](auto& s) { AddParameters(s, (1 << 20) + 1); }},
        HostileSpec{"NoModules", [](auto& s) { s.clear_tree(); }},
        HostileSpec{"ParentAfterChild", [](auto& s) { s.mutable_tree()->mutable_modules(1)->set_parent(3); }},
        HostileSpec{"ParentOutOfRange", [](auto& s) { s.mutable_tree()->mutable_modules(1)->set_parent(-7); }},
        HostileSpec{"UnknownDType",
                    [](auto& s) {
                      s.mutable_tree()->mutable_modules(0)->mutable_parameters(0)->set_dtype(
                          static_cast<v1::DType>(99));
                    }},
        HostileSpec{"WorldSizeZero", [](auto& s) { s.set_world_size(0); }},
        HostileSpec{"WorldSizeNegative", [](auto& s) { s.set_world_size(-1); }},
        HostileSpec{"WorldSizeHuge", [](auto& s) { s.set_world_size(1 << 30); }},
        HostileSpec{"NameWithAPath", [](auto& s) { s.set_name("../../etc/passwd"); }},
        HostileSpec{"NameTooLong", [](auto& s) { s.set_name(std::string(129, 'x')); }},
        HostileSpec{"NameEmpty", [](auto& s) { s.set_name(""); }},
        HostileSpec{"UnknownFqnInPolicy", [](auto& s) { s.mutable_policy()->mutable_fqns()->add_fqns("no.such"); }},
        HostileSpec{"UnknownFqnInOptimizerGroup",
                    [](auto& s) { s.mutable_config()->mutable_optimizer()->add_groups()->add_fqns("no.such"); }},
        HostileSpec{"TiedParametersThatDiffer",
                    [](auto& s) { s.mutable_tree()->mutable_modules(3)->mutable_parameters(0)->set_shape(0, 9); }},
        HostileSpec{"DivideFactorNotANumber",
                    [](auto& s) { s.mutable_config()->set_gradient_divide_factor(std::nan("")); }},
        HostileSpec{"GraceTimeNegative", [](auto& s) { s.mutable_config()->set_grace_ms(-1); }},
        HostileSpec{"ShardGroupsBeyondTheWorld",
                    [](auto& s) {
                      s.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD);
                      s.mutable_config()->add_shard_groups()->add_ranks(1 << 30);
                    }},
        HostileSpec{"ShardGroupsWithoutNumber",
                    [](auto& s) {
                      s.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD);
                      for (int i = 0; i < 100'000; ++i) s.mutable_config()->add_shard_groups();
                    }},
        HostileSpec{"ShardGroupOfRanksWithoutNumber",
                    [](auto& s) {
                      s.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD);
                      v1::ShardGroup* group = s.mutable_config()->add_shard_groups();
                      for (int i = 0; i < 1'000'000; ++i) group->add_ranks(i);
                    }},
        HostileSpec{"ShardGroupSizeNegative",
                    [](auto& s) {
                      s.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD);
                      s.mutable_config()->set_shard_group_size(-1);
                    }},
        HostileSpec{"KeepEveryNegative", [](auto& s) { s.mutable_config()->set_keep_every(-1); }},
        HostileSpec{"StatesOfAnOptimizerThatIsTheDaemons",
                    [](auto& s) { s.mutable_config()->mutable_optimizer()->set_trainer_states(1); }},
        HostileSpec{"OptimizerInTrainersThatNeverWrite",
                    [](auto& s) { s.mutable_config()->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER); }}),
    [](const auto& info) { return info.param.name; });

TEST_F(BadInput, AMillionParametersAndTwoThousandNestedModulesAreServed) {
  StartDaemonWithJob();
  RawClient client(socket());
  v1::JobSpec spec = SpecOf({{"name", "many"}, {"world", "1"}});
  AddParameters(spec, 1'000'000);
  const auto many = client.Open(spec);
  ASSERT_TRUE(many.ok()) << many.status();
  spec = SpecOf({{"name", "deep"}, {"world", "1"}});
  std::string path = "d";
  for (int i = 0; i < 2000; ++i) {  // names grow with the depth, so the message does with its square
    v1::Module& module = *spec.mutable_tree()->add_modules();
    module.set_name(path);
    module.set_parent(i == 0 ? 0 : spec.tree().modules_size() - 2);
    path += ".d";
  }
  const auto deep = client.Open(spec);
  ASSERT_TRUE(deep.ok()) << deep.status();
  ExpectJobIntact();
  EXPECT_TRUE(client.Close(many->job_id()).ok());
  EXPECT_TRUE(client.Close(deep->job_id()).ok());
}

}  // namespace
}  // namespace shardd::faults
