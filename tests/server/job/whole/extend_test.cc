// Ranks ask together that more be trained: who is answered what, and what another job takes over.

#include <algorithm>
#include <cstring>
#include <random>

#include "server/job/job_extend.h"
#include "tests/common/plan/random_spec.h"
#include "tests/server/device/plan_slabs.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

SpecBuilder PartlyFrozen() {
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_trainers_never_write(true);
  builder.Param(0, "w", {64});
  builder.Param(0, "f", {8}, {.requires_grad = false});
  builder.Param(0, "g", {8}, {.requires_grad = false});
  return builder;
}

class ExtendTest : public JobCoreTest {
 protected:
  ExtendTest() : JobCoreTest(PartlyFrozen()) {}

  // The rank asks to train parameter `index`.
  void Ask(int rank, int index = 1) {
    SpecBuilder asked = PartlyFrozen();
    asked.module(0).mutable_parameters(index)->set_requires_grad(true);
    absl::StatusOr<Extension> extension = Extend(asked.spec(), job_->identity().spec, *plan_);
    ASSERT_TRUE(extension.ok()) << extension.status();
    OnLoop([&] {
      job_->AwaitExtension(
          job_->sessions()[rank].get(), std::make_shared<const Extension>(*std::move(extension)),
          [this, rank](const absl::Status& status) { answers_[rank].push_back(status); },
          [this](const std::shared_ptr<const Extension>& agreed, const std::vector<Extensions::Done>& asked) {
            built_.push_back(agreed->what);
            asked_ = asked;
          });
    });
  }
  std::vector<absl::Status> Answers(int rank) {
    std::vector<absl::Status> result;
    OnLoop([&] { result = answers_[rank]; });
    return result;
  }
  void ExpectAnswer(int rank, absl::StatusCode code, const std::vector<std::string>& fragments) {
    const std::vector<absl::Status> answers = Answers(rank);
    ASSERT_EQ(answers.size(), 1u) << "rank " << rank;
    EXPECT_EQ(answers[0].code(), code) << answers[0];
    for (const std::string& fragment : fragments) {
      EXPECT_NE(answers[0].message().find(fragment), absl::string_view::npos) << answers[0] << " has no " << fragment;
    }
  }

  std::vector<absl::Status> answers_[kRanks];
  std::vector<std::string> built_;
  std::vector<Extensions::Done> asked_;
};

TEST_F(ExtendTest, IsBuiltOnceWhenAllRanksAskForTheSame) {
  Ask(0);
  EXPECT_TRUE(built_.empty());
  EXPECT_TRUE(Answers(0).empty());
  Ask(1);
  EXPECT_EQ(built_, std::vector<std::string>{"parameter \"f\""});
  OnLoop([&] {
    EXPECT_TRUE(job_->extensions().building());
    EXPECT_EQ(job_->committed_facts().epoch, job_->committed().epoch() + 1);
    for (const auto& done : asked_) done(absl::OkStatus());
  });
  ExpectAnswer(0, absl::StatusCode::kOk, {});
  ExpectAnswer(1, absl::StatusCode::kOk, {});
}

TEST_F(ExtendTest, GoingOnWithoutAskingEndsTheEpochAndIsNamed) {
  Ask(0);
  Backward(1);
  ExpectAnswer(0, absl::StatusCode::kFailedPrecondition, {"rank 0 trains parameter \"f\"", "(rank=1"});
  EXPECT_EQ(epoch(), 2u);
  EXPECT_NE(streams_[1]->Aborted().message().find("rank 0 trains parameter \"f\""), std::string::npos);
}

TEST_F(ExtendTest, SoDoesOneThatWentOnBefore) {
  Backward(1);
  Ask(0);
  ExpectAnswer(0, absl::StatusCode::kFailedPrecondition, {"rank 0 trains parameter \"f\"", "(rank=1"});
  EXPECT_EQ(epoch(), 2u);
}

TEST_F(ExtendTest, RanksThatAskDifferentlyAreToldAndGoOn) {
  Ask(0, 1);
  Ask(1, 2);
  for (int rank = 0; rank < kRanks; ++rank) {
    ExpectAnswer(rank, absl::StatusCode::kFailedPrecondition, {"got parameter \"g\", rank 0: parameter \"f\""});
  }
  EXPECT_TRUE(built_.empty());
  Train(0);
  Train(1);
  EXPECT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
  EXPECT_EQ(epoch(), 1u);
}

TEST_F(ExtendTest, AnInterruptedRankMayGoOn) {
  Ask(0);
  Train(0);
  ExpectAnswer(0, absl::StatusCode::kCancelled, {"has gone on instead"});
  Train(1);
  EXPECT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
}

TEST_F(ExtendTest, ALostRankEndsTheWaitAndVoidsTheBuild) {
  Ask(0);
  Ask(1);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  OnLoop([&] { EXPECT_FALSE(job_->extensions().building()); });
  EXPECT_TRUE(Answers(0).empty()) << "its builder answers";
  for (int rank = 0; rank < kRanks; ++rank) Attach(rank);
  Ask(0);
  OnLoop([&] { job_->SessionLost(1, "its process ended"); });
  ExpectAnswer(0, absl::StatusCode::kAborted, {"rank 1 is lost"});
}

TEST_F(ExtendTest, AStepUnderWayComesFirst) {
  TrainUntilDecided();
  Ask(0);
  ExpectAnswer(0, absl::StatusCode::kFailedPrecondition, {"a step is not committed yet"});
  Release();
  EXPECT_TRUE(Until([&] { return job_->view().committed_step() == 1; }));
}

// Slabs of a plan; each element of each purpose and copy has a value of its own.
struct Slabs {
  explicit Slabs(const ShardPlan& plan)
      : shards(plan.memory.shards_bytes),
        parameters(plan.memory.parameters_bytes),
        optimizer(plan.memory.optimizer_bytes) {}
  SlabPointers pointers() { return {shards.data(), parameters.data(), nullptr, optimizer.data()}; }
  Bytes shards, parameters, optimizer;
};

// visit(what, bytes of the parameter there, their number).
template <typename Visit>
void VisitParam(const ShardPlan& plan, const SlabPointers& slabs, int p, Visit visit) {
  const ParamPlan& param = plan.params[p];
  const FlatParamPlan& flat = plan.flat_params[param.flat_param];
  const int64_t stored = DTypeSizeBytes(flat.dtype);
  for (int c = 0; c < plan.shard_copies; ++c) {
    visit(absl::StrCat("shard ", c),
          slabs.shards + c * plan.shards_stride_bytes + flat.shards_offset_bytes + param.offset * stored,
          param.numel * stored);
  }
  if (flat.params_offset_bytes >= 0) {
    const int64_t element = DTypeSizeBytes(flat.unsharded_dtype);
    visit("cast copy", slabs.parameters + flat.params_offset_bytes + param.offset * element, param.numel * element);
  }
  for (int k = 0; flat.optimizer_offset_bytes >= 0 && k < plan.optimizer_states * plan.optimizer_copies; ++k) {
    visit(absl::StrCat("state ", k),
          slabs.optimizer + k / plan.optimizer_states * plan.optimizer_stride_bytes + flat.optimizer_offset_bytes +
              k % plan.optimizer_states * flat.StateStrideBytes() + param.offset * 4,
          param.numel * 4);
  }
}

char PatternOf(int param, const std::string& what, int64_t i) {
  return static_cast<char>(static_cast<int64_t>(std::hash<std::string>()(what) % 97) + param * 31 + i * 7);
}

TEST(CopyExtended, EveryElementKeepsItsParameterAndNewStateIsZero) {
  int unfrozen = 0;
  for (uint32_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    RandomSpec random(seed);
    random.MixPrecision();
    const v1::JobSpec wide = random.spec();
    v1::JobSpec narrow = wide;
    std::mt19937 choose(seed);
    for (v1::Module& module : *narrow.mutable_tree()->mutable_modules()) {
      for (v1::Parameter& param : *module.mutable_parameters()) {
        param.set_requires_grad(param.requires_grad() && (param.storage_id() != 0 || choose() % 2 == 0));
      }
    }
    const absl::StatusOr<ShardPlan> from = PlanShards(narrow);
    const absl::StatusOr<ShardPlan> to = PlanShards(wide);
    ASSERT_TRUE(from.ok() && to.ok());
    Slabs source(*from), target(*to);
    for (size_t p = 0; p < from->params.size(); ++p) {
      VisitParam(*from, source.pointers(), static_cast<int>(p), [&](const std::string& what, char* data, int64_t size) {
        for (int64_t i = 0; i < size; ++i) data[i] = PatternOf(static_cast<int>(p), what, i);
      });
    }
    CopyExtended(*from, source.pointers(), *to, target.pointers(),
                 [](char* to_bytes, const char* from_bytes, int64_t size_bytes) {
                   std::memcpy(to_bytes, from_bytes, static_cast<size_t>(size_bytes));
                 });
    for (size_t p = 0; p < to->params.size(); ++p) {
      const bool is_new = to->params[p].requires_grad && !from->params[p].requires_grad;
      unfrozen += is_new ? 1 : 0;
      VisitParam(*to, target.pointers(), static_cast<int>(p), [&](const std::string& what, char* data, int64_t size) {
        for (int64_t i = 0; i < size; ++i) {
          const bool zero = is_new && what.substr(0, 5) == "state";
          ASSERT_EQ(data[i], zero ? 0 : PatternOf(static_cast<int>(p), what, i)) << to->params[p].fqn << " " << what;
        }
      });
    }
  }
  EXPECT_GT(unfrozen, 300);
}

}  // namespace
}  // namespace shardd
