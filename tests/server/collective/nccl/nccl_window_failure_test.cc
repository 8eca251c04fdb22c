// Registrations of the window that hang or fail, and what is in order behind sums that wait for one.

#include <utility>

#include "tests/server/collective/nccl/nccl_window_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The call itself, which nothing in NCCL bounds: nobody waits for it longer, and its slots' memory stays with it.
TEST_F(NcclWindowTest, SumsAreMadeByCopiesWhileARegistrationHangs) {
  limit_ = absl::Milliseconds(500);
  Library().hold = true;
  Start(/*rows=*/6, v1::LAYOUT_FLAT, /*remakes=*/true);
  const std::weak_ptr<NcclCommunicator> before = made_[0];
  const std::weak_ptr<const DeviceSlab> kept = slabs_[1];
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_FALSE(communicator_->broken().ok());
  EXPECT_THAT(collective_->Describe(), HasSubstr(": 0 gradient elements summed by it"));
  EXPECT_THAT(collective_->Describe(),
              HasSubstr("no symmetric window, registered 0 time(s): ncclCommWindowRegister, or "
                        "a communicator instead, has not come back after 1s"));
  AwaitStatus("aborted and made anew 1 time(s)");  // beside the one that hangs
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("384 gradient elements summed by it"));
  collective_->SetSlots(1, nullptr);
  slabs_[1] = nullptr;
  EXPECT_FALSE(before.expired() || kept.expired()) << "NCCL may still look at them";
  Library().hold = false;
  AwaitEnd(before);
  EXPECT_TRUE(kept.expired());
}

TEST_F(NcclWindowTest, ADeregistrationThatDoesNotReturnIsLeftToo) {
  limit_ = absl::Milliseconds(500);
  table_.CommWindowDeregister = [](ncclComm_t comm, ncclWindow_t window) {
    while (Library().hold) absl::SleepFor(absl::Milliseconds(1));
    return fake_nccl::Table().CommWindowDeregister(comm, window);
  };
  Start(/*rows=*/6);
  ASSERT_TRUE(Reduce().ok());
  Library().hold = true;
  const auto again = slabs_[1];
  collective_->SetSlots(1, nullptr);
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  collective_->SetSlots(1, again);
  ASSERT_TRUE(Reduce().ok());
  EXPECT_THAT(collective_->Describe(), HasSubstr("ncclCommWindowDeregister has not come back after 1s"));
  EXPECT_THAT(collective_->Describe(), HasSubstr("384 gradient elements summed by it"));
}

// The registration fails for another that is made anew, before anybody has used it: who sums is the one in its place.
TEST_F(NcclWindowTest, ACommunicatorThatReplacesTheOneMadeAnewStays) {
  table_.CommWindowRegister = [](ncclComm_t comm, void* p, size_t size_bytes, ncclWindow_t* window, int flags) {
    if (++Library().registrations > kRanks) return ncclUnhandledCudaError;
    return fake_nccl::Table().CommWindowRegister(comm, p, size_bytes, window, flags);
  };
  Start(/*rows=*/6, v1::LAYOUT_FLAT, /*remakes=*/true);
  ASSERT_TRUE(Reduce().ok());
  communicator_->Break(absl::UnavailableError("enough"));
  ASSERT_TRUE(Reduce().ok()) << "by copies";
  AwaitStatus("aborted and made anew 1 time(s)");
  AwaitStatus("no symmetric window, registered 1 time(s): ncclCommWindowRegister");
  ASSERT_TRUE(Reduce().ok());
  ExpectSums();
  EXPECT_THAT(collective_->Describe(), HasSubstr("768 gradient elements summed by it"));
  EXPECT_THAT(collective_->Describe(), Not(HasSubstr("all by copies")));
}

// What comes before a sum waits with it: zeros of gradient shards, which the sum before it has written.
TEST_F(NcclWindowTest, ZerosOfASumAreBehindTheSumsBeforeIt) {
  Library().hold = true;
  Start(/*rows=*/6);
  ASSERT_TRUE(collective_->may_hold_requests());
  const auto with_zeros = [this] {
    ReduceScatterRequest request = Request({65536, 65536, 65536});
    request.modes.assign(request.modes.size(), GradientMode::kAccumulate);
    request.zeros.resize(kRanks);
    for (const int f : plan_.groups[static_cast<size_t>(group_)].flat_params) {
      auto* const begin = reinterpret_cast<float*>(gradients_[0].data() +
                                                   plan_.flat_params[static_cast<size_t>(f)].gradients_offset_bytes);
      for (int rank = 0; rank < kRanks; ++rank) {
        for (const Segment& segment : WorkSegments(plan_, f, rank)) {
          request.zeros[static_cast<size_t>(rank)].emplace_back(
              ZeroOp{begin + segment.offset, segment.numel * static_cast<int64_t>(sizeof(float))});
        }
      }
    }
    return request;
  };
  absl::Notification first, second, by_copies;
  collective_->ReduceScatter(Request(), [&](const absl::Status&) { first.Notify(); });
  collective_->ReduceScatter(with_zeros(), [&](const absl::Status&) { second.Notify(); });
  EXPECT_FALSE(first.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  Library().hold = false;
  ASSERT_TRUE(first.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ASSERT_TRUE(second.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectSums();
  communicator_->Break(absl::UnavailableError("enough"));
  collective_->ReduceScatter(with_zeros(), [&](const absl::Status&) { by_copies.Notify(); });
  ASSERT_TRUE(by_copies.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectSums();
}

}  // namespace
}  // namespace shardd
