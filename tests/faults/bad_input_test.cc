// What clients may get wrong, by mistake or on purpose: each has a status with the right code, the job's committed
// state stays what it was, and the daemon lives and serves others.

#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "tests/e2e/cluster.h"
#include "tests/faults/raw_client.h"

namespace shardd::faults {
namespace {

using e2e::Args;
using e2e::ExpectSame;
using e2e::TrainerReport;
using testing::Child;
using testing::PollUntil;

class BadInput : public e2e::Cluster {
 protected:
  // A job of one rank with five committed steps, without sessions.
  void StartDaemonWithJob() {
    StartDaemon();
    ExpectAllOk(RunRanks(job_.With({{"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}})));
    ASSERT_EQ(Job().committed_step(), 5);
  }
  // It is what it was: the three steps that follow end where an undisturbed run of eight ends, bit for bit.
  void ExpectJobIntact() {
    ASSERT_TRUE(DaemonAlive());
    ASSERT_TRUE(PollUntil([&] { return Job().attached_ranks() == 0; }));
    ASSERT_EQ(Job().committed_step(), 5);
    const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
    ExpectAllOk(reports);
    EXPECT_EQ(reports[0].Note("attached"), "attached 5");
    ExpectServesOthers();
    ExpectSame(reports, {Report(other_, 0)});
  }
  void ExpectServesOthers() { ExpectAllOk(RunRanks(other_)); }

  const Args job_ = {{"world", "1"}};
  const Args other_ = {{"world", "1"}, {"name", "bystander"}, {"steps", "8"}};
};

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), text)) << status << "\nwants: " << text;
}

// Membership ---------------------------------------------------------------------------------------------------------

TEST_F(BadInput, UnknownJobsAndRanksAreRefused) {
  StartDaemonWithJob();
  RawClient client(socket());
  ExpectStatus(client.Attach(4711, 0).status(), absl::StatusCode::kNotFound, "no such job");
  const uint64_t id = Job().job_id();
  for (const int rank : {-1, 1, 1 << 30, std::numeric_limits<int>::min()}) {
    ExpectStatus(client.Attach(id, rank).status(), absl::StatusCode::kInvalidArgument,
                 absl::StrCat("no such rank (got ", rank, ", want 0 to 0)"));
  }
  ExpectJobIntact();
}

TEST_F(BadInput, ARankWithALiveSessionIsNotAttachedTwice) {
  StartDaemonWithJob();
  {
    RawClient holder(socket());
    ASSERT_TRUE(holder.Enter(SpecOf(job_), 0).ok());
    const TrainerReport second = RunRanks(job_.With({{"steps", "8"}}))[0];
    EXPECT_EQ(second.code, static_cast<int>(Code::kAlreadyExists)) << second.message;
    EXPECT_TRUE(absl::StrContains(second.message, absl::StrCat("pid=", getpid()))) << second.message;
  }
  ExpectJobIntact();
}

TEST_F(BadInput, ReplaceKillsTheHolderAndTakesItsPlace) {
  StartDaemonWithJob();
  const Args holder_args = job_.With({{"steps", "1000000"}, {"pause", "unsharded@5"}});
  Child holder = StartRank(0, holder_args);
  AwaitPause(job_, "unsharded", 0);
  const TrainerReport replacement = RunRanks(job_.With({{"steps", "8"}, {"replace", "1"}, {"finish", "0"}}))[0];
  EXPECT_EQ(replacement.code, 0) << replacement.message;
  EXPECT_EQ(replacement.Note("attached"), "attached 5");
  EXPECT_EQ(holder.Wait(), 1000 + SIGKILL);
  ExpectServesOthers();
  ExpectSame({replacement}, {Report(other_, 0)});
}

// Opening ------------------------------------------------------------------------------------------------------------

TEST_F(BadInput, ClientAndDaemonOfDifferentVersionsAreToldSo) {
  StartDaemonWithJob();
  v1::OpenJobRequest request;
  request.set_protocol_version(kProtocolVersion + 1);
  *request.mutable_spec() = SpecOf(job_);
  RawClient client(socket());
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "different versions");
  request.set_protocol_version(kProtocolVersion);
  request.set_plan_digest(std::string(32, 'x'));
  ExpectStatus(client.Open(request).status(), absl::StatusCode::kFailedPrecondition, "plan differently");
  ExpectJobIntact();
}

TEST_F(BadInput, ARankThatDescribesAnotherJobIsToldTheFirstDifference) {
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
  EXPECT_EQ(DaemonFootprint().state_files, before.state_files);
  EXPECT_EQ(DaemonFootprint().shared_maps, before.shared_maps);
  ExpectJobIntact();
}

void SetShape(v1::JobSpec& spec, std::initializer_list<int64_t> shape) {
  v1::Parameter& parameter = *spec.mutable_tree()->mutable_modules(0)->mutable_parameters(0);
  parameter.clear_shape();
  for (const int64_t extent : shape) parameter.add_shape(extent);
}

void AddParameters(v1::JobSpec& spec, int count) {
  for (int i = 0; i < count; ++i) {
    v1::Parameter& parameter = *spec.mutable_tree()->mutable_modules(0)->add_parameters();
    parameter.set_name(absl::StrCat("p", i));
    parameter.set_dtype(v1::DTYPE_FLOAT32);
  }
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
        HostileSpec{"HybridShard", [](auto& s) { s.mutable_config()->set_strategy(v1::STRATEGY_HYBRID_SHARD); },
                    absl::StatusCode::kUnimplemented},
        HostileSpec{"TrainersWrite", [](auto& s) { s.mutable_config()->set_trainers_never_write(false); },
                    absl::StatusCode::kUnimplemented}),
    [](const auto& info) { return info.param.name; });

TEST_F(BadInput, AMillionParametersAndTwoThousandNestedModulesAreServed) {
  StartDaemon();
  RawClient client(socket());
  v1::JobSpec spec = SpecOf({{"name", "many"}, {"world", "1"}});
  AddParameters(spec, 1'000'000);
  const auto many = client.Open(spec);
  EXPECT_TRUE(many.ok()) << many.status();
  spec = SpecOf({{"name", "deep"}, {"world", "1"}});
  std::string path = "d";
  for (int i = 0; i < 2000; ++i) {  // names grow with the depth, so the message does with its square
    v1::Module& module = *spec.mutable_tree()->add_modules();
    module.set_name(path);
    module.set_parent(i == 0 ? 0 : spec.tree().modules_size() - 2);
    path += ".d";
  }
  const auto deep = client.Open(spec);
  EXPECT_TRUE(deep.ok()) << deep.status();
  ExpectServesOthers();
}

// Commands -----------------------------------------------------------------------------------------------------------

struct Misuse {
  const char* name;
  std::function<void(RawClient&)> act;
  absl::StatusCode code;
  const char* text;
};
std::ostream& operator<<(std::ostream& out, const Misuse& misuse) { return out << misuse.name; }

CommandRecord Record(Opcode opcode, int group = 0, int64_t arg0 = 0, int64_t arg1 = 0, int64_t arg2 = 0,
                     uint32_t flags = 0) {
  CommandRecord record = {};
  record.opcode = opcode;
  record.group = group;
  record.arg0 = arg0;
  record.arg1 = arg1;
  record.arg2 = arg2;
  record.flags = flags;
  return record;
}

v1::Step GoodStep() {
  v1::Step step;
  v1::HyperParameters& h = *step.add_groups();
  h.set_lr(0.01);
  h.set_beta1(0.9);
  h.set_beta2(0.99);
  h.set_eps(1e-8);
  return step;
}

void SendStep(RawClient& client, const v1::Step& step) {
  const std::string bytes = step.SerializeAsString();
  std::memcpy(client.payload(), bytes.data(), std::min<size_t>(bytes.size(), kStepPayloadBytes));
  client.Send(Record(Opcode::kStep, 0, static_cast<int64_t>(bytes.size())));
}

void SendOnStream(RawClient& client, const std::function<void(v1::Command&)>& fill) {
  v1::SessionRequest request;
  fill(*request.mutable_commands()->add_commands());
  ASSERT_TRUE(client.stream().Write(request));
}

class HostileSession : public BadInput, public ::testing::WithParamInterface<Misuse> {};

TEST_P(HostileSession, EndsItsOwnStepAndNothingElse) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    GetParam().act(client);
    ExpectStatus(client.stream().End(), GetParam().code, GetParam().text);
  }
  ExpectJobIntact();
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

INSTANTIATE_TEST_SUITE_P(
    Ring, HostileSession,
    ::testing::Values(
        Misuse{"WrongSequence", [](auto& c) { c.Send(Record(Opcode::kUnshard, 0, 1), 7); }, kInvalid, "sequence"},
        Misuse{"UnknownOpcode", [](auto& c) { c.Send(Record(static_cast<Opcode>(12345))); }, kInvalid, "12345"},
        Misuse{"NoOpcode", [](auto& c) { c.Send(Record(Opcode::kInvalid)); }, kInvalid, "opcode"},
        Misuse{"GroupBeyondTheLast", [](auto& c) { c.Send(Record(Opcode::kUnshard, 4, 1)); }, kInvalid, "got 4"},
        Misuse{"GroupNegative", [](auto& c) { c.Send(Record(Opcode::kReshard, -1)); }, kInvalid, "got -1"},
        Misuse{"GroupHugeInSubmit", [](auto& c) { c.Send(Record(Opcode::kSubmitGradients, 1 << 30)); }, kInvalid,
               "no such group"},
        Misuse{"GroupHugeInWait", [](auto& c) { c.Send(Record(Opcode::kWaitGradientSlot, 1 << 30)); }, kInvalid,
               "no such group"},
        Misuse{"SubmittedJumps", [](auto& c) { c.Announce(TimelineValue(c.session().epoch(), uint64_t{1} << 39)); },
               kInvalid, "out of range"},
        Misuse{"SubmittedOneBeyondTheRing",
               [](auto& c) { c.Announce(TimelineValue(c.session().epoch(), kRingRecords + 1)); }, kInvalid,
               "out of range"},
        Misuse{"SubmittedGoesBack",
               [](auto& c) {
                 for (int i = 0; i < 3; ++i) c.Send(Record(Opcode::kUnshard, 0, 1));
                 ASSERT_TRUE(c.Consumed());
                 c.Announce(TimelineValue(c.session().epoch(), 1));
               },
               kInvalid, "out of range"},
        Misuse{"EnterPass", [](auto& c) { c.Send(Record(Opcode::kEnterPass, 0, 1)); }, absl::StatusCode::kUnimplemented,
               "EnterPass"}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Payload, HostileSession,
    ::testing::Values(
        Misuse{"StepLengthNegative", [](auto& c) { c.Send(Record(Opcode::kStep, 0, -1)); }, kInvalid, "payload"},
        Misuse{"StepLengthLeast",
               [](auto& c) { c.Send(Record(Opcode::kStep, 0, std::numeric_limits<int64_t>::min())); }, kInvalid,
               "payload"},
        Misuse{"StepLengthHuge", [](auto& c) { c.Send(Record(Opcode::kStep, 0, kMost)); }, kInvalid, "payload"},
        Misuse{"StepOfNoise",
               [](auto& c) {
                 std::memset(c.payload(), 0xff, 64);
                 c.Send(Record(Opcode::kStep, 0, 64));
               },
               kInvalid, "not a shardd.v1.Step"},
        Misuse{"StepWithTooMuchTrainerState",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.set_trainer_state(std::string(kMaxTrainerStateBytes + 1, 'x'));
                 SendStep(c, step);
               },
               kInvalid, "trainer state is too large"},
        Misuse{"StepOnTheStreamWithTooMuchTrainerState",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   *command.mutable_step() = GoodStep();
                   command.mutable_step()->set_trainer_state(std::string(20 << 20, 'x'));
                 });
               },
               kInvalid, "trainer state is too large"},
        Misuse{"StepWithoutOptimizerGroups", [](auto& c) { SendStep(c, v1::Step()); }, kInvalid, "optimizer groups"},
        Misuse{"StepWithALearningRateThatIsNoNumber",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.mutable_groups(0)->set_lr(std::nan(""));
                 SendStep(c, step);
               },
               kInvalid, "lr"},
        Misuse{"StepWithANegativeNormLimit",
               [](auto& c) {
                 v1::Step step = GoodStep();
                 step.set_max_grad_norm(-1);
                 SendStep(c, step);
               },
               kInvalid, "max_grad_norm"},
        Misuse{"StepWithAnOpenGroup",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD));
                 SendStep(c, GoodStep());
               },
               kPrecondition, "\"embed\""},
        Misuse{"StepWithAnOpenBackward",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 1, v1::PHASE_FORWARD));
                 c.Send(Record(Opcode::kSubmitGradients, 1));
                 c.Send(Record(Opcode::kReshard, 1));
                 SendStep(c, GoodStep());
               },
               kPrecondition, "BackwardDone"}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Protocol, HostileSession,
    ::testing::Values(
        Misuse{"UnknownPhase", [](auto& c) { c.Send(Record(Opcode::kUnshard, 0, 77)); }, kInvalid, "phase"},
        Misuse{"ReshardOfWhatIsSharded", [](auto& c) { c.Send(Record(Opcode::kReshard, 2)); }, kPrecondition,
               "\"mid\""},
        Misuse{"GradientsOutsideAPass", [](auto& c) { c.Send(Record(Opcode::kSubmitGradients, 2)); }, kPrecondition,
               "\"mid\""},
        Misuse{"GradientOfAFrozenParameter",
               [](auto& c) {
                 c.Send(Record(Opcode::kUnshard, 2, v1::PHASE_FORWARD));
                 std::memset(c.memory().template At<char>(c.layout().mask_offset_bytes[2]), 0xff, 1);
                 c.Send(Record(Opcode::kSubmitGradients, 2, 0, 0, 0, kHasPresent));
               },
               kInvalid, "\"mid.frozen\" is frozen"},
        Misuse{"MaskOfTheWrongSizeOnTheStream",
               [](auto& c) {
                 SendOnStream(c, [](v1::Command& command) {
                   command.mutable_submit_gradients()->set_group(2);
                   command.mutable_submit_gradients()->set_present(std::string(5000, '\xff'));
                 });
               },
               kInvalid, "mask has the wrong size"},
        Misuse{"CommandOfNoKind", [](auto& c) { SendOnStream(c, [](v1::Command&) {}); }, kInvalid, "kind"},
        Misuse{"BackwardsOutOfOrder", [](auto& c) { c.Send(Record(Opcode::kBackwardDone, 0, 3)); }, kPrecondition,
               "wrong index (got 3, want 0)"},
        Misuse{"WriteOfTrainedParameters", [](auto& c) { c.Send(Record(Opcode::kWriteParameters, 0, 0, 1)); },
               kPrecondition, "before version 1"},
        Misuse{"WriteOfAnUnknownParameter", [](auto& c) { c.Send(Record(Opcode::kWriteParameters, -1, 0, 1)); },
               kInvalid, "no such parameter"},
        Misuse{"CommitOfNothing", [](auto& c) { c.Send(Record(Opcode::kCommitParameters)); }, kPrecondition,
               "CommitParameters"},
        Misuse{"LeaveWithoutEnter", [](auto& c) { c.Send(Record(Opcode::kLeaveFullParams)); }, kPrecondition,
               "not inside"},
        Misuse{"EnterTwice",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams));
                 c.Send(Record(Opcode::kEnterFullParams));
               },
               kPrecondition, "inside already"},
        Misuse{"WritebackOutsideOfTheParameter",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 c.Send(Record(Opcode::kWriteParameters, 0, kMost, kMost));
               },
               kInvalid, "out of range"},
        Misuse{"WritebackFromOutsideOfTheMemory",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 c.Send(Record(Opcode::kWriteParameters, 0, 0, 3, int64_t{1} << 40));
               },
               kInvalid, "staging"},
        Misuse{"WritebackThatIsNeverCommitted",
               [](auto& c) {
                 c.Send(Record(Opcode::kEnterFullParams, 0, 0, 0, 0, kWriteback));
                 std::memset(c.payload(), 0x41, 64);
                 c.Send(Record(Opcode::kWriteParameters, 0, 0, 3, c.layout().payload_offset_bytes));
                 c.Send(Record(Opcode::kUnshard, 9));
               },
               kInvalid, "no such group"},
        Misuse{"SecondHello", [](auto& c) { c.stream().Hello(c.session().session_id(), c.session().token()); },
               kInvalid, "second hello"},
        Misuse{"MessageOfNoKind", [](auto& c) { (void)c.stream().Write(v1::SessionRequest()); }, kInvalid,
               "no known kind"}),
    [](const auto& info) { return info.param.name; });

TEST_F(BadInput, WordsOfAnotherEpochAreNotRead) {
  StartDaemonWithJob();
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    for (const uint64_t epoch : {client.session().epoch() - 1, client.session().epoch() + 1, uint64_t{0xffffff}}) {
      client.Announce(TimelineValue(epoch, 5));
    }
    EXPECT_TRUE(DaemonAlive());
    EXPECT_EQ(Ranks()[0].commands(), 0);
    EXPECT_EQ(Ranks()[0].state(), v1::RANK_STATE_IDLE);
  }
  ExpectJobIntact();
}

// Sessions and sockets -----------------------------------------------------------------------------------------------

TEST_F(BadInput, ASessionBelongsToItsStreamAlone) {
  StartDaemonWithJob();
  {
    RawClient owner(socket());
    ASSERT_TRUE(owner.Enter(SpecOf(job_), 0).ok());
    const uint64_t aborts = Job().counters().aborts();
    RawClient stranger(socket());
    v1::SessionRequest detach;
    detach.mutable_detach();
    v1::SessionRequest command;
    command.mutable_commands()->add_commands()->mutable_step();
    {
      RawStream guess(stranger.stub());  // the session's number is easily guessed, its token is not
      guess.Hello(owner.session().session_id(), std::string(kTokenBytes, 'x'));
      guess.Write(detach);
      guess.Write(command);
      ExpectStatus(guess.End(), absl::StatusCode::kUnauthenticated, "wrong token");
    }
    {
      RawStream second(stranger.stub());
      second.Hello(owner.session().session_id(), owner.session().token());
      second.Write(detach);
      ExpectStatus(second.End(), absl::StatusCode::kAlreadyExists, "stream already");
    }
    {
      RawStream early(stranger.stub());
      early.Write(command);
      ExpectStatus(early.End(), absl::StatusCode::kFailedPrecondition, "hello");
    }
    {
      RawStream early(stranger.stub());
      early.Write(detach);
      ExpectStatus(early.End(), absl::StatusCode::kFailedPrecondition, "hello");
    }
    {
      RawStream unknown(stranger.stub());
      unknown.Hello(0, "");
      ExpectStatus(unknown.End(), absl::StatusCode::kUnauthenticated, "no such session");
    }
    EXPECT_EQ(Ranks()[0].session_id(), owner.session().session_id());
    EXPECT_EQ(Job().counters().aborts(), aborts);
    owner.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    EXPECT_TRUE(owner.Consumed());  // it still works
  }
  ExpectJobIntact();
}

TEST_F(BadInput, DescriptorsNeedTheTokenOfALiveSession) {
  StartDaemonWithJob();
  std::string stale_token;
  uint64_t stale_id = 0;
  {
    RawClient client(socket());
    ASSERT_TRUE(client.Enter(SpecOf(job_), 0).ok());
    stale_id = client.session().session_id();
    stale_token = client.session().token();
    ExpectStatus(FetchSessionFds(socket(), stale_id, std::string(kTokenBytes, 'x'), testing::kLimit).status(),
                 absl::StatusCode::kPermissionDenied, "wrong token");
    ExpectStatus(FetchSessionFds(socket(), stale_id + 1, stale_token, testing::kLimit).status(),
                 absl::StatusCode::kPermissionDenied, "no such session");
    EXPECT_TRUE(FetchSessionFds(socket(), stale_id, stale_token, testing::kLimit).ok());
  }
  ASSERT_TRUE(PollUntil([&] { return Job().attached_ranks() == 0; }));
  ExpectStatus(FetchSessionFds(socket(), stale_id, stale_token, testing::kLimit).status(),
               absl::StatusCode::kPermissionDenied, "no such session");
  ExpectJobIntact();
}

TEST_F(BadInput, GarbageOnTheSocketIsHungUpOn) {
  StartDaemonWithJob();
  std::string noise(4096, '\0');
  for (size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<char>(i * 7919 >> 3);
  const std::string texts[] = {
      "GET / HTTP/1.1\r\n\r\n", noise, "P" + noise, "S" + noise, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise, "SHFD"};
  for (const std::string& text : texts) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, socket().c_str(), sizeof(address.sun_path) - 1);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    (void)!send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    // Whatever is answered, it ends.
    EXPECT_TRUE(PollUntil([fd] {
      char buffer[4096];
      return recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT) == 0 || (errno != EAGAIN && errno != EINTR);
    })) << text.substr(0, 20);
    close(fd);
  }
  ExpectJobIntact();
}

// Limits -------------------------------------------------------------------------------------------------------------

TEST_F(BadInput, TheQuotaOfJobsIsKept) {
  StartDaemon({"--max_jobs_per_uid=1"});
  RawClient client(socket());
  ASSERT_TRUE(client.Open(SpecOf({{"name", "first"}})).ok());
  ExpectStatus(client.Open(SpecOf({{"name", "second"}})).status(), absl::StatusCode::kResourceExhausted,
               "--max_jobs_per_uid");
  EXPECT_TRUE(client.Open(SpecOf({{"name", "first"}})).ok());  // joining is not opening
}

TEST_F(BadInput, TheQuotaOfBytesIsKept) {
  StartDaemon({"--max_bytes_per_uid=3000000"});
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}});
  SetShape(large, {1'000'000});
  ExpectStatus(client.Open(large).status(), absl::StatusCode::kResourceExhausted, "--max_bytes_per_uid");
  ExpectServesOthers();
}

// A file system of its own as the state directory; away with the test.
class SmallTmpfs {
 public:
  explicit SmallTmpfs(const std::string& path) : path_(path) {
    mkdir(path.c_str(), 0700);
    mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, "size=12m,mode=0700") == 0;
  }
  ~SmallTmpfs() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

 private:
  const std::string path_;
  bool mounted_ = false;
};

TEST_F(BadInput, AFullTmpfsRefusesTheJobThatDoesNotFit) {
  const SmallTmpfs tmpfs(File("small"));
  if (!tmpfs.mounted()) {
    GTEST_SKIP() << "mounting a tmpfs needs privileges that this run does not have: " << std::strerror(errno);
  }
  StartDaemon({"--state_dir=" + File("small")});
  ExpectAllOk(RunRanks(job_.With({{"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}})));
  RawClient client(socket());
  v1::JobSpec large = SpecOf({{"name", "large"}});
  SetShape(large, {4 << 20});
  const absl::Status status = client.Open(large).status();
  ExpectStatus(status, absl::StatusCode::kResourceExhausted, "large");
  // Small ones until there is no room, also not for a journal.
  absl::Status last;
  for (int i = 0; i < 64 && last.ok(); ++i) {
    last = client.Open(SpecOf({{"name", absl::StrCat("filler", i)}})).status();
  }
  EXPECT_EQ(last.code(), absl::StatusCode::kResourceExhausted) << last;
  const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 5");
  EXPECT_TRUE(DaemonAlive());
}

}  // namespace
}  // namespace shardd::faults
