#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_AWAIT_ENDS_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_AWAIT_ENDS_H_

#include <gtest/gtest.h>

#include <memory>

#include "absl/time/clock.h"
#include "server/collective/nccl/nccl_communicator.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {

// What is broken is taken apart by a thread of its own, which calls the driver: it comes before the driver's end.
inline void AwaitEnd(const std::weak_ptr<NcclCommunicator>& communicator) {
  for (int i = 0; i < 10000 && !communicator.expired(); ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(communicator.expired());
}

// The same of those that nobody has a pointer to, such as NCCL has refused: what they have of the driver is given back,
// but for the context of the world's registered memory. The next test's driver is the same functions.
inline void AwaitEnds(const fake_cuda::Machine& machine) {
  const auto held = [&] {
    return machine.Calls("cuDevicePrimaryCtxRetain") - machine.Calls("cuDevicePrimaryCtxRelease");
  };
  for (int i = 0; i < 10000 && held() > 1; ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(held(), 1);
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_AWAIT_ENDS_H_
