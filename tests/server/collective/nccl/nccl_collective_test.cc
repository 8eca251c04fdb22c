// What goes through NCCL and what does not, and what happens when it fails.

#include "server/collective/nccl/nccl_collective.h"

#include <stdlib.h>

#include <atomic>
#include <tuple>

#include "server/collective/nccl/nccl_communicators.h"
#include "tests/server/collective/nccl/fake_nccl_world.h"
#include "tests/testing/build_paths.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class NcclCollectiveTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  // Group "a" of two parameters that make three equal parts, or three that do so with two elements of padding.
  ShardPlan Plan(bool even, DType param_dtype = v1::DTYPE_UNSPECIFIED, v1::Layout layout = v1::LAYOUT_FLAT) {
    SpecBuilder builder(kRanks);
    builder.config().set_layout(layout);
    builder.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
    const int a = builder.AddSharded(0, "a");
    builder.Param(a, "w", {even ? 192 : 190});
    builder.Param(a, "v", {192});
    return builder.Plan();
  }
  void Start(ShardPlan plan) {
    plan_ = std::move(plan);
    BytesMemory() = gpus_.memory();
    devices_ = gpus_.MakeAll();
    for (const auto& device : devices_) wrapped_.push_back(std::make_unique<WrappedDevice>(device.get()));
    auto made = NcclCommunicator::Create(library_, gpus_.driver(), {0, 1, 2});
    ASSERT_TRUE(made.ok()) << made.status();
    communicator_ = *std::move(made);
    collective_ = std::make_unique<NcclCollective>(
        std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()}, communicator_);
    group_ = plan_.FindGroup("a");
    gradients_.emplace_back(plan_.memory.gradients_bytes, 0xff);
  }
  void TearDown() override {
    const std::weak_ptr<NcclCommunicator> made = communicator_;
    collective_.reset();
    communicator_.reset();
    wrapped_.clear();
    devices_.clear();
    AwaitEnd(made);
    for (const auto& anew : made_anew_) AwaitEnd(anew);
    made_anew_.clear();
    slots_.clear();
    gradients_.clear();
    BytesMemory() = std::pmr::new_delete_resource();
    AwaitEnds(gpus_.machine());
  }
  absl::Status Reduce(std::vector<bool> of_rank_1 = {true, true}) {
    ReduceScatterRequest request;
    request.plan = &plan_;
    request.group = group_;
    slots_.clear();
    for (int rank = 0; rank < kRanks; ++rank) {
      slots_.emplace_back(plan_.groups[group_].gradient_bytes, 0xff);
      for (const int param : plan_.groups[group_].params) {
        WriteSlot(plan_, slots_.back(), param, ParamValues(plan_, param, rank));
      }
      request.sources.push_back({rank, slots_.back().data(), rank == 1 ? of_rank_1 : std::vector<bool>{true, true}});
    }
    request.modes.assign(2, GradientMode::kOverwrite);
    request.gradients = gradients_[0].data();
    request.label = "reduce a";
    absl::Notification done;
    absl::Status result;
    collective_->ReduceScatter(request, [&](absl::Status status) {
      result = std::move(status);
      done.Notify();
    });
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return result;
  }
  void ExpectSums(std::vector<bool> of_rank_1 = {true, true}) {
    for (size_t i = 0; i < 2; ++i) {
      const int param = plan_.groups[group_].params[i];
      std::vector<float> want(static_cast<size_t>(plan_.params[param].numel));
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == 1 && !of_rank_1[i]) continue;
        const std::vector<float> values = ParamValues(plan_, param, rank);
        for (size_t k = 0; k < want.size(); ++k) want[k] += values[k];
      }
      EXPECT_EQ(ReadGradient(plan_, gradients_[0], param), want) << plan_.params[param].fqn;
    }
  }
  std::vector<SumOp> Sums(int device) {
    std::vector<SumOp> sums;
    for (const WrappedDevice::Record& record : wrapped_[static_cast<size_t>(device)]->records()) {
      for (const DeviceOp& op : record.ops) {
        if (const SumOp* const sum = std::get_if<SumOp>(&op); sum != nullptr) sums.push_back(*sum);
      }
    }
    return sums;
  }

  FakeCudaWorld gpus_{/*delay_seed=*/3, /*gpus=*/kRanks, /*queue_limit=*/1024};
  const NcclLibrary library_{fake_nccl::Table(), 22809};
  ShardPlan plan_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<WrappedDevice>> wrapped_;
  std::shared_ptr<NcclCommunicator> communicator_;
  std::vector<std::weak_ptr<NcclCommunicator>> made_anew_;  // let go by the thread that made them, perhaps
  std::unique_ptr<NcclCollective> collective_;
  std::vector<Bytes> slots_, gradients_;
  int group_ = 0;
};

TEST_F(NcclCollectiveTest, EqualPartsAreOneReduceScatter) {
  Start(Plan(/*even=*/true));
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  for (int device = 0; device < kRanks; ++device) {
    const std::vector<SumOp> sums = Sums(device);
    ASSERT_EQ(sums.size(), 1u);
    EXPECT_TRUE(sums[0].scatter);
    EXPECT_EQ(sums[0].numel, 384);
  }
  EXPECT_THAT(collective_->Describe(),
              HasSubstr("nccl 2.28.9 over cuda:0, cuda:1, cuda:2: 384 gradient elements summed by it, 0 by copies"));
}

// Padding lies in the last part: what is there in slots, NaN here, gets nowhere.
TEST_F(NcclCollectiveTest, PartsThatPaddingMakesEqualAreOneReduceScatter) {
  Start(Plan(/*even=*/false));
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  ASSERT_EQ(Sums(2).size(), 1u);
  EXPECT_TRUE(Sums(2)[0].scatter);
  EXPECT_EQ(Sums(2)[0].numel, 384);
  EXPECT_THAT(collective_->Describe(), HasSubstr("382 gradient elements summed by it"));
}

// Of the two parameters one has as many rows for each rank, the other 64, 64 and 62.
TEST_F(NcclCollectiveTest, EqualPartsShareAReduceScatterAndOthersHaveRoots) {
  nccl::Table table = fake_nccl::Table();
  static std::atomic<int> reduces, scatters;
  reduces = scatters = 0;
  table.Reduce = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
    ++reduces;
    return fake_nccl::Table().Reduce(send, receive, count, dtype, op, root, comm, stream);
  };
  table.ReduceScatter = [](const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    ++scatters;
    return fake_nccl::Table().ReduceScatter(send, receive, count, dtype, op, comm, stream);
  };
  Start(Plan(/*even=*/false, v1::DTYPE_UNSPECIFIED, v1::LAYOUT_DIM0));
  communicator_ = *NcclCommunicator::Create(NcclLibrary(table, 22809), gpus_.driver(), {0, 1, 2});
  collective_ = std::make_unique<NcclCollective>(
      std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()}, communicator_);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  ASSERT_EQ(Sums(2).size(), 1u);
  EXPECT_FALSE(Sums(2)[0].scatter);
  EXPECT_EQ(scatters, kRanks);
  EXPECT_EQ(reduces, kRanks * 3);
  EXPECT_THAT(collective_->Describe(),
              HasSubstr("symmetric windows are off; along rings: \"a\" (3 of 6 parts are not "));
}

TEST_F(NcclCollectiveTest, IncompleteAndNonFp32GradientsAreReducedByCopies) {
  Start(Plan(/*even=*/true));
  const std::vector<bool> no_v = {true, false};
  ASSERT_TRUE(Reduce(no_v).ok());
  ExpectSums(no_v);
  EXPECT_THAT(collective_->Describe(), HasSubstr("192 gradient elements summed by it, 192 by copies"));
  TearDown();
  Start(Plan(/*even=*/true, v1::DTYPE_BFLOAT16));
  ASSERT_TRUE(Reduce().ok());
  EXPECT_TRUE(Sums(0).empty());
  EXPECT_THAT(collective_->Describe(), HasSubstr("symmetric windows are off; by copies: \"a\""));
}

TEST_F(NcclCollectiveTest, AFailedMemberReleasesOthersAndLaterSumsAreCopies) {
  Start(Plan(/*even=*/true));
  wrapped_[1]->FailWith(absl::UnavailableError("no work today"));
  const absl::Status status = Reduce();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(communicator_->broken().message()), HasSubstr("is given up: no work today"));
  wrapped_[1]->FailWith(absl::OkStatus());
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("all by copies from now on"));
}

// The sums until then are copies, the ones after it NCCL's again.
TEST_F(NcclCollectiveTest, ABrokenCommunicatorIsMadeAnewForLaterRequests) {
  Start(Plan(/*even=*/true));
  std::atomic<int> made = 0;
  collective_ = std::make_unique<NcclCollective>(
      std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()}, communicator_,
      [&]() -> absl::StatusOr<std::shared_ptr<NcclCommunicator>> {
        ++made;
        auto communicator = NcclCommunicator::Create(library_, gpus_.driver(), {0, 1, 2});
        if (communicator.ok()) made_anew_.push_back(*communicator);
        return communicator;
      });
  wrapped_[1]->FailWith(absl::UnavailableError("no work today"));
  EXPECT_FALSE(Reduce().ok());
  wrapped_[1]->FailWith(absl::OkStatus());
  EXPECT_EQ(made, 0) << "nobody has asked for more yet";
  EXPECT_THAT(collective_->Describe(), HasSubstr("all by copies until it is made anew: "));
  const size_t before = Sums(0).size();
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_EQ(Sums(0).size(), before) << "by copies";
  for (int i = 0; i < 10000 && collective_->Describe().find("made anew 1 time(s)") == std::string::npos; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_THAT(collective_->Describe(), HasSubstr("aborted and made anew 1 time(s), last because nccl 2.28.9 over"));
  EXPECT_THAT(collective_->Describe(), HasSubstr("no work today"));
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_EQ(Sums(0).size(), before + 1) << "by the new one";
  EXPECT_EQ(made, 1);
}

TEST_F(NcclCollectiveTest, OneThatBreaksAgainAndAgainIsGivenUp) {
  Start(Plan(/*even=*/true));
  std::atomic<int> made = 0;
  absl::Mutex mutex;
  std::shared_ptr<NcclCommunicator> last = communicator_;
  collective_ = std::make_unique<NcclCollective>(
      std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()}, communicator_,
      [&]() -> absl::StatusOr<std::shared_ptr<NcclCommunicator>> {
        auto communicator = NcclCommunicator::Create(library_, gpus_.driver(), {0, 1, 2});
        if (!communicator.ok()) return communicator.status();
        absl::MutexLock lock(&mutex);
        made_anew_.push_back(*communicator);
        last = *communicator;
        ++made;
        return last;
      });
  for (int times = 1; times <= NcclCollective::kMostRemakes; ++times) {
    {
      absl::MutexLock lock(&mutex);
      last->Break(absl::UnavailableError("no memory for its buffers"));
    }
    ASSERT_TRUE(Reduce().ok());
    const std::string want = absl::StrCat("made anew ", times, " time(s)");
    for (int i = 0; i < 10000 && collective_->Describe().find(want) == std::string::npos; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    ASSERT_THAT(collective_->Describe(), HasSubstr(want));
  }
  {
    absl::MutexLock lock(&mutex);
    last->Break(absl::UnavailableError("no memory for its buffers"));
    last = nullptr;
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Reduce().ok());
    ExpectSums();
  }
  EXPECT_EQ(made, NcclCollective::kMostRemakes);
  EXPECT_THAT(collective_->Describe(), HasSubstr("all by copies from now on: "));
  EXPECT_THAT(collective_->Describe(), HasSubstr("it broke after it was made anew 3 times"));
}

TEST_F(NcclCollectiveTest, RemakingIsTriedOnceAndStatusSaysWhyItFailed) {
  Start(Plan(/*even=*/true));
  std::atomic<int> tried = 0;
  collective_ =
      std::make_unique<NcclCollective>(std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()},
                                       communicator_, [&]() -> absl::StatusOr<std::shared_ptr<NcclCommunicator>> {
                                         ++tried;
                                         return absl::InternalError("no communicators left");
                                       });
  communicator_->Break(absl::UnavailableError("enough"));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Reduce().ok());
    ExpectSums();
    for (int k = 0; k < 10000 && collective_->Describe().find("from now on") == std::string::npos; ++k) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  EXPECT_EQ(tried, 1);
  EXPECT_THAT(collective_->Describe(), HasSubstr("all by copies from now on: "));
  EXPECT_THAT(collective_->Describe(), HasSubstr("enough; it cannot be made anew: no communicators left"));
}

TEST_F(NcclCollectiveTest, ALostGpuEndsTheSumOnEveryMember) {
  Start(Plan(/*even=*/true));
  gpus_.machine().LoseGpu(1, CUDA_ERROR_ECC_UNCORRECTABLE);
  const absl::Status status = Reduce();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(communicator_->broken().ok());
}

TEST_F(NcclCollectiveTest, ACallTheLibraryRefusesFailsWithItsWords) {
  nccl::Table table = fake_nccl::Table();
  table.ReduceScatter = [](const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return ncclUnhandledCudaError;
  };
  const NcclLibrary refuses(table, 22809);
  Start(Plan(/*even=*/true));
  communicator_ = *NcclCommunicator::Create(refuses, gpus_.driver(), {0, 1, 2});
  collective_ = std::make_unique<NcclCollective>(
      std::vector<Device*>{wrapped_[0].get(), wrapped_[1].get(), wrapped_[2].get()}, communicator_);
  const absl::Status status = Reduce();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ncclReduceScatter cuda:"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("unhandled cuda error (result 1): no last words"));
}

// None where copy engines do, else few; a library of before 2.31 refuses both at once.
TEST_F(NcclCollectiveTest, CommunicatorsTakeFewMultiprocessorsByTheLibrarysPolicies) {
  static std::vector<ncclConfig_t> configs;
  nccl::Table table = fake_nccl::Table();
  table.CommInitRankConfig = [](ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    configs.push_back(*config);
    return fake_nccl::Table().CommInitRankConfig(comm, ranks, id, rank, config);
  };
  for (const auto& [version, policy, text] : std::vector<std::tuple<int, int, const char*>>{
           {22800, 2, "policy zero"}, {23007, 2, "policy zero"}, {23100, 3, "policy zero and efficiency"}}) {
    configs.clear();
    setenv("FAKE_NCCL_VERSION", absl::StrCat(version).c_str(), 1);
    NcclCommunicator::Options options;
    options.max_ctas = 5;
    auto made = NcclCommunicator::Create(NcclLibrary(table, version), gpus_.driver(), {0, 1}, options);
    unsetenv("FAKE_NCCL_VERSION");
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_THAT((*made)->details(), HasSubstr(text));
    EXPECT_THAT((*made)->details(), HasSubstr("at most 5 CTAs"));
    ASSERT_EQ(configs.size(), 2u);
    for (const ncclConfig_t& config : configs) {
      EXPECT_EQ(config.CTAPolicy, policy);
      EXPECT_EQ(config.maxCTAs, 5);
      EXPECT_EQ(config.blocking, 0);
    }
  }
  // What a library does not take is an error with its words, and no communicator.
  setenv("FAKE_NCCL_VERSION", "23007", 1);
  const absl::Status refused = NcclCommunicator::Create(NcclLibrary(table, 23100), gpus_.driver(), {0, 1}).status();
  unsetenv("FAKE_NCCL_VERSION");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("ncclCommInitRankConfig cuda:0"));
}

// As tests/gpu/nccl_test.cc asks of NVIDIA's.
TEST_F(NcclCollectiveTest, TwoMembersOnOneGpuAreHarmlesslyRefused) {
  const absl::Status refused = NcclCommunicator::Create(library_, gpus_.driver(), {0, 0}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("ncclCommInitRankConfig cuda:0"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("(result 5): Duplicate GPU detected"));
  EXPECT_TRUE(NcclCommunicator::Create(library_, gpus_.driver(), {0, 1}).ok());
}

TEST_F(NcclCollectiveTest, EachRankCountGetsOneCommunicatorOrAReason) {
  NcclCommunicators communicators(library_, gpus_.driver(), {0, 1, 2});
  EXPECT_THAT(std::string(communicators.For(1).status().message()), HasSubstr("one rank"));
  EXPECT_THAT(std::string(communicators.For(4).status().message()),
              HasSubstr("a GPU for each rank (got 4 ranks on 3 GPUs)"));
  const auto first = communicators.For(2);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*communicators.For(2), *first);
  (*first)->Break(absl::UnavailableError("enough"));
  const auto second = communicators.For(2);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(*second, *first);
  nccl::Table table = fake_nccl::Table();
  table.CommInitRankConfig = [](ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) { return ncclSystemError; };
  NcclCommunicators never(NcclLibrary(table, 22809), gpus_.driver(), {0, 1, 2});
  EXPECT_THAT(std::string(never.For(2).status().message()), HasSubstr("ncclCommInitRankConfig cuda:0"));
}

TEST(NcclLibraryTest, ConnectsSumsEarlyUnlessTheEnvironmentSaysOtherwise) {
  unsetenv("NCCL_RUNTIME_CONNECT");
  NcclLibrary::SetEnvironment();
  EXPECT_EQ(NcclLibrary::Settings(), "NCCL with NCCL_RUNTIME_CONNECT=0");
  setenv("NCCL_RUNTIME_CONNECT", "1", /*overwrite=*/1);
  NcclLibrary::SetEnvironment();
  EXPECT_EQ(NcclLibrary::Settings(), "NCCL with NCCL_RUNTIME_CONNECT=1");
  unsetenv("NCCL_RUNTIME_CONNECT");
}

TEST(NcclLibraryTest, IsLoadedWhereItIsAndRefusedByName) {
  const std::string here = absl::StrCat(built::kFakesDir, "/libnccl.so.2");
  const auto library = NcclLibrary::Load(here);
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->version(), "2.28.9");
  const absl::Status missing = NcclLibrary::Load("libnccl-not-here.so").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("\"libnccl-not-here.so\": it cannot be loaded"));
  const absl::Status other = NcclLibrary::Load("libm.so.6").status();
  EXPECT_THAT(std::string(other.message()), HasSubstr("it has no ncclGetVersion"));
  setenv("FAKE_NCCL_VERSION", "22703", 1);
  const absl::Status old = NcclLibrary::Load(here).status();
  unsetenv("FAKE_NCCL_VERSION");
  EXPECT_THAT(std::string(old.message()), HasSubstr("too old (got 2.27.3, want 2.28.0 or later)"));
}

}  // namespace
}  // namespace shardd
