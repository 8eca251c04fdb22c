// Gradients that other ranks give and this one does not: through the C ABI and a real daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "client/c/shardd.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

using ::testing::IsEmpty;

constexpr int kWorld = 2;

std::vector<int32_t> GivenByOthers(Rank& rank) {
  const int32_t* params = nullptr;
  int32_t count = 0;
  EXPECT_C_OK(shardd_given_by_others(rank.job(), &params, &count));
  return {params, params + count};
}

// Gives all of the group, or (an empty mask) nothing of it.
void Give(Rank& rank, int group, bool gives) {
  rank.Unshard(group, SHARDD_BACKWARD);
  ASSERT_C_OK(shardd_wait_gradient_slot(rank.job(), group));
  const shardd_group_info info = rank.GroupInfo(group);
  for (int i = 0; i < info.param_count; ++i) {
    if (auto* slot = static_cast<float*>(shardd_gradient_data(rank.job(), info.params[i])); slot != nullptr) {
      std::fill_n(slot, rank.ParamInfo(info.params[i]).numel, 2.0f);
    }
  }
  const std::vector<uint8_t> nothing(static_cast<size_t>(info.param_count), 0);
  ASSERT_C_OK(shardd_submit_gradients(rank.job(), group, gives ? nullptr : nothing.data(), nullptr));
  ASSERT_C_OK(shardd_reshard(rank.job(), group));
}

void CloseAndWait(Rank& rank) {
  ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
  ASSERT_C_OK(shardd_wait_gradients(rank.job()));
}

class OthersGradients : public ::testing::TestWithParam<const char*> {
 protected:
  OthersGradients() : daemon_(kWorld), ranks_(kWorld) {
    setenv("SHARDD_CONTROL", GetParam(), 1);
    for (int i = 0; i < kWorld; ++i) {
      EXPECT_C_OK(ranks_[static_cast<size_t>(i)].Attach(daemon_.address(), SmallSpec("job", kWorld), i));
    }
    Each([](int, Rank& rank) { rank.WriteAll(1.0f); });
  }
  ~OthersGradients() override { unsetenv("SHARDD_CONTROL"); }
  void Each(const std::function<void(int, Rank&)>& body) {
    ForEachRank(kWorld, [&](int rank) { body(rank, ranks_[static_cast<size_t>(rank)]); });
  }
  // Of the job, as the daemon counts them.
  std::string Questions() {
    char* json = nullptr;
    EXPECT_C_OK(shardd_describe_job(ranks_[0].job(), &json));
    const std::string text = json;
    shardd_string_free(json);
    const std::string key = "\"gradient_questions\":\"";
    const size_t at = text.find(key);
    return at == std::string::npos ? text
                                   : text.substr(at + key.size(), text.find('"', at + key.size()) - at - key.size());
  }

  Daemon daemon_;
  std::vector<Rank> ranks_;
};

TEST_P(OthersGradients, AreNamedToWhomeverLacksThem) {
  Each([](int index, Rank& rank) {
    Give(rank, rank.Group("b"), true);
    Give(rank, rank.Group("a"), index == 1);
    CloseAndWait(rank);
    const std::vector<int32_t> lacking = {rank.Param("a.weight"), rank.Param("a.bias")};
    EXPECT_EQ(GivenByOthers(rank), index == 1 ? std::vector<int32_t>() : lacking);
    EXPECT_THAT(GivenByOthers(rank), IsEmpty()) << "once";
    const auto* reduced = static_cast<const float*>(shardd_gradient_shard_data(rank.job(), rank.Param("a.weight")));
    EXPECT_EQ(*reduced, 1) << "2 and nothing";
  });
  EXPECT_EQ(Questions(), "1");
}

TEST_P(OthersGradients, AreStillNamedAfterBackwardsWithoutAQuestion) {
  Each([](int index, Rank& rank) {
    for (const bool gives : {index == 0, false, false}) {
      Give(rank, rank.Group("b"), true);
      Give(rank, rank.Group("a"), gives);
      CloseAndWait(rank);
    }
    EXPECT_EQ(GivenByOthers(rank).size(), index == 0 ? 0u : 2u);
  });
}

TEST_P(OthersGradients, AreOfTheRunningStep) {
  Each([](int index, Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      Give(rank, rank.Group("a"), index == step % 2);
      CloseAndWait(rank);
      EXPECT_EQ(GivenByOthers(rank).size(), index == step % 2 ? 0u : 2u) << step;
      const shardd_hyperparameters group = Sgd(1);
      ASSERT_C_OK(shardd_step(rank.job(), &group, 1, 0, nullptr, 0));
      ASSERT_C_OK(shardd_wait_step(rank.job(), nullptr));
      EXPECT_THAT(GivenByOthers(rank), IsEmpty());
    }
  });
}

TEST_P(OthersGradients, BeforeTheReductionIsKnownTheCallIsRefused) {
  Each([](int index, Rank& rank) {
    if (index == 0) {
      const int32_t* params = nullptr;
      int32_t count = 0;
      Give(rank, rank.Group("a"), true);
      ASSERT_C_OK(shardd_backward_done(rank.job(), 0));
      EXPECT_C_ERROR(shardd_given_by_others(rank.job(), &params, &count), kFailedPrecondition,
                     "call shardd_wait_gradients first");
      EXPECT_C_ERROR(shardd_given_by_others(rank.job(), nullptr, &count), kInvalidArgument, "params or count is NULL");
    }
  });
}

TEST_P(OthersGradients, WhereAllGiveTheSameNobodyAsks) {
  Each([](int, Rank& rank) {
    for (const bool gives : {true, false, true}) {
      Give(rank, rank.Group("b"), true);
      Give(rank, rank.Group("a"), gives);
      CloseAndWait(rank);
      EXPECT_THAT(GivenByOthers(rank), IsEmpty());
    }
  });
  EXPECT_EQ(Questions(), "0");
}

INSTANTIATE_TEST_SUITE_P(Of, OthersGradients, ::testing::Values("ring", "grpc"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shardd::testing_client
