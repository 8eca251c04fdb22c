// Links on a machine whose clock is set back.

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "tests/server/peer/peer_fixture.h"

namespace {

std::atomic<int64_t> set_back_s{0};

}  // namespace

// In place of glibc's, for the whole binary: only the wall clock differs, and only while a test says so.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) {
    time->tv_sec -= set_back_s.load(std::memory_order_relaxed);
  }
  return result;
}

namespace shardd::testing {
namespace {

TEST(PeerClockTest, AClockSetBackByAnHourStopsNoCalls) {
  Nodes nodes(2);
  nodes.Join(1);
  ASSERT_TRUE(nodes.at(1).WaitDowns(0, 1));  // it has called, and will again
  set_back_s = 3600;
  nodes.Join(0);
  EXPECT_TRUE(nodes.at(1).WaitUp(0));
  EXPECT_TRUE(nodes.at(0).WaitUp(1));
  set_back_s = 0;
}

}  // namespace
}  // namespace shardd::testing
