#include "common/shm/timeline.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <string>
#include <thread>
#include <vector>

#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/timeline_internal.h"
#include "tests/common/shm/process_util.h"

namespace shardd {
namespace {

using testing::Child;
using testing::kLimit;

static_assert(TimelineValue(2, 0) > TimelineValue(1, kTimelineSequenceMask));
// As a GPU compares (cuStreamWaitValue64, GEQ): by the sign of the difference. A new epoch ends every wait of the one
// before, where the sign bit changes and where the epoch's 24 bits wrap, too; nothing earlier does.
constexpr bool StreamGoesOn(uint64_t word, uint64_t target) { return static_cast<int64_t>(word - target) >= 0; }
constexpr bool EpochEndsWaitsOf(uint64_t epoch) {
  const uint64_t last = TimelineValue(epoch, kTimelineSequenceMask);
  return StreamGoesOn(TimelineValue(epoch + 1, 0), last) && StreamGoesOn(TimelineValue(epoch + 1, 0), last - 1) &&
         !StreamGoesOn(last - 1, last) && !StreamGoesOn(TimelineValue(epoch, 0), TimelineValue(epoch, 1));
}
static_assert(EpochEndsWaitsOf(1) && EpochEndsWaitsOf((1 << 23) - 1) && EpochEndsWaitsOf((1 << 24) - 1));
static_assert(TimelineEpoch(TimelineValue(77, 5)) == 77 && TimelineSequence(TimelineValue(77, 5)) == 5);

// Two pages as client and daemon have them: each process writes its own side only.
struct Shared {
  alignas(128) TimelineWord daemon_word;
  alignas(128) TimelineWord client_word;
  alignas(128) std::atomic<uint32_t> client_waiting;
  alignas(128) std::atomic<uint32_t> daemon_waiting;
  alignas(128) std::atomic<uint32_t> other_waiting[3];
};

class TimelineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto slab = Slab::Create("timelines", SlabBacking::kSealedMemfd, sizeof(Shared));
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = *std::move(slab);
    shared_ = slab_->At<Shared>(0);
  }
  std::unique_ptr<Slab> slab_;
  Shared* shared_ = nullptr;
};

TEST_F(TimelineTest, SatisfiedWaitNeitherSleepsNorRaisesWaiting) {
  shared_->daemon_word = 5;
  shared_->client_waiting = 0;
  for (const uint64_t target : {0, 1, 5}) {
    EXPECT_EQ(TimelineWait(shared_->daemon_word, target, shared_->client_waiting, -absl::InfiniteDuration()),
              WaitResult::kReached);
  }
  EXPECT_EQ(shared_->client_waiting, 0u);
}

TEST_F(TimelineTest, DeadlinesAreHonoured) {
  for (const absl::Duration spin : {absl::ZeroDuration(), absl::Microseconds(20), absl::Hours(1)}) {
    for (const absl::Duration timeout : {absl::Milliseconds(1), absl::Milliseconds(30), absl::Milliseconds(250)}) {
      const absl::Time start = absl::Now();
      EXPECT_EQ(TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, timeout, spin), WaitResult::kTimedOut);
      const absl::Duration took = absl::Now() - start;
      EXPECT_GE(took, timeout - absl::Milliseconds(1));  // two clocks
      EXPECT_LT(took, timeout + absl::Seconds(5));
    }
    for (const absl::Duration limit : {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
      EXPECT_EQ(TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, limit, spin), WaitResult::kTimedOut);
    }
    EXPECT_EQ(shared_->client_waiting, 0u);
  }
}

TEST_F(TimelineTest, InfiniteDeadlineWaitsUntilTheWordComes) {
  Child writer([this] {
    CHILD_CHECK(testing::PollUntil([this] { return shared_->client_waiting != 0; }));
    TimelineStore(shared_->daemon_word, 1, &shared_->client_waiting);
    return 0;
  });
  EXPECT_EQ(TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, absl::InfiniteDuration()),
            WaitResult::kReached);
  EXPECT_EQ(writer.Wait(), 0);
}

// A wake that comes too early is lost where store and look are not in one order. With slices longer than the test's
// limit a single lost wake is a timeout here; the product's slices would hide it as 100 ms.
class PingPongTest : public TimelineTest, public ::testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Spins, PingPongTest, ::testing::Values(0, 1, 20),
                         [](const auto& info) { return std::to_string(info.param) + "us"; });

TEST_P(PingPongTest, NoWakeIsLostBetweenProcesses) {
  constexpr uint64_t kRounds = 20'000;
  const absl::Duration spin = absl::Microseconds(GetParam());
  const auto wait = [spin](const TimelineWord& word, uint64_t target, std::atomic<uint32_t>& waiting) {
    return shm_internal::TimelineWaitSliced(word, target, waiting, kLimit, spin, absl::Hours(1));
  };
  Child client([&] {
    for (uint64_t n = 1; n <= kRounds; ++n) {
      CHILD_CHECK(wait(shared_->daemon_word, TimelineValue(3, n), shared_->client_waiting) == WaitResult::kReached);
      TimelineStore(shared_->client_word, TimelineValue(3, n), &shared_->daemon_waiting);
    }
    return 0;
  });
  for (uint64_t n = 1; n <= kRounds; ++n) {
    TimelineStore(shared_->daemon_word, TimelineValue(3, n), &shared_->client_waiting);
    ASSERT_EQ(wait(shared_->client_word, TimelineValue(3, n), shared_->daemon_waiting), WaitResult::kReached) << n;
  }
  EXPECT_EQ(client.Wait(), 0);
  EXPECT_EQ(shared_->client_waiting, 0u);
  EXPECT_EQ(shared_->daemon_waiting, 0u);
}

// The writer runs free, the readers fall asleep and wake at random places: each must see every target in order.
TEST_P(PingPongTest, FreeRunningWriterLosesNoWakeOfSeveralReaders) {
  constexpr uint64_t kLast = 100'000;
  const absl::Duration spin = absl::Microseconds(GetParam());
  std::vector<Child> readers;
  for (int reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&] {
      uint64_t seen = 0;
      for (uint64_t target = 1; target <= kLast; target = std::max(target, seen) + 1 + (target % 3)) {
        CHILD_CHECK(shm_internal::TimelineWaitSliced(shared_->daemon_word, target, shared_->client_waiting, kLimit,
                                                     spin, absl::Hours(1)) == WaitResult::kReached);
        const uint64_t now = shared_->daemon_word.load();
        CHILD_CHECK(now >= target && now >= seen);
        seen = now;
      }
      return 0;
    });
  }
  for (uint64_t n = 1; n <= kLast + 3; ++n) {
    TimelineStore(shared_->daemon_word, n, &shared_->client_waiting);
  }
  for (Child& reader : readers) {
    EXPECT_EQ(reader.Wait(), 0);
  }
  EXPECT_EQ(shared_->client_waiting, 0u);
}

TEST_F(TimelineTest, LaterEpochReleasesEveryOlderWait) {
  shared_->daemon_word = TimelineValue(1, 4);
  std::vector<Child> waiters;
  for (const uint64_t sequence : {uint64_t{5}, uint64_t{1000}, kTimelineSequenceMask}) {
    waiters.emplace_back([this, sequence] {
      CHILD_CHECK(TimelineWait(shared_->daemon_word, TimelineValue(1, sequence), shared_->client_waiting, kLimit,
                               absl::ZeroDuration()) == WaitResult::kReached);
      return static_cast<int>(TimelineEpoch(shared_->daemon_word.load()));  // whoever wakes compares epochs
    });
  }
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 3; }));
  TimelineStore(shared_->daemon_word, TimelineValue(2, 0), &shared_->client_waiting);
  for (Child& waiter : waiters) {
    EXPECT_EQ(waiter.Wait(), 2);
  }
}

TEST_F(TimelineTest, NewEpochsWithTheSameLowHalfAreSeenSoon) {
  // The futex word does not change here, so only the wake or the slice can end the wait.
  shared_->daemon_word = TimelineValue(1, 4);
  Child waiter([this] {
    CHILD_CHECK(TimelineWait(shared_->daemon_word, TimelineValue(1, 5), shared_->client_waiting, kLimit,
                             absl::ZeroDuration()) == WaitResult::kReached);
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 1; }));
  const absl::Time start = absl::Now();
  TimelineStore(shared_->daemon_word, TimelineValue(2, 4), nullptr);
  EXPECT_EQ(waiter.Wait(), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(TimelineTest, LostWakeCostsASliceAndNeverTheDeadline) {
  Child waiter([this] {
    CHILD_CHECK(TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, 10 * kLimit, absl::ZeroDuration()) ==
                WaitResult::kReached);
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 1; }));
  const std::atomic<uint32_t> hostile{0};  // somebody has cleared the flag: the writer believes that nobody sleeps
  TimelineStore(shared_->daemon_word, 1, &hostile);
  EXPECT_EQ(waiter.Wait(), 0);
}

TEST_F(TimelineTest, ASignalHandlerEndsTheWaitAtOnce) {
  Child waiter([this] {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;  // as most hosts install theirs
    CHILD_CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
    // No slice of its own: only the signal can end this before the limit.
    CHILD_CHECK(shm_internal::TimelineWaitSliced(shared_->daemon_word, 1, shared_->client_waiting, 10 * kLimit,
                                                 absl::ZeroDuration(), 10 * kLimit) == WaitResult::kInterrupted);
    CHILD_CHECK(shared_->client_waiting == 0);
    // The next wait is none the worse for it.
    CHILD_CHECK(signal(SIGUSR1, SIG_IGN) != SIG_ERR);
    shared_->client_word = 1;
    CHILD_CHECK(TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, kLimit) == WaitResult::kReached);
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 1; }));
  // Again and again: the first may come just before it sleeps.
  EXPECT_TRUE(testing::PollUntil([&] {
    waiter.Kill(SIGUSR1);
    return shared_->client_word == 1;
  }));
  TimelineStore(shared_->daemon_word, 1, &shared_->client_waiting);
  EXPECT_EQ(waiter.Wait(), 0);
}

TEST_F(TimelineTest, KilledWaiterDoesNotDisturbTheOthers) {
  Child victim([this] {
    TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, absl::InfiniteDuration(), absl::ZeroDuration());
    return 0;
  });
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 1; }));
  victim.Kill();
  EXPECT_EQ(victim.Wait(), 1000 + SIGKILL);
  EXPECT_EQ(shared_->client_waiting, 1u);  // stale: costs system calls until the page is dropped, nothing else
  Child other([this] {
    return TimelineWait(shared_->daemon_word, 1, shared_->client_waiting, kLimit, absl::ZeroDuration()) ==
                   WaitResult::kReached
               ? 0
               : 1;
  });
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 2; }));
  TimelineStore(shared_->daemon_word, 1, &shared_->client_waiting);
  EXPECT_EQ(other.Wait(), 0);
}

TEST_F(TimelineTest, AKilledWritersReadersTimeOutUntilTheEpochAdvances) {
  Child writer([this] {
    for (uint64_t n = 1;; ++n) {
      TimelineStore(shared_->client_word, TimelineValue(1, n), &shared_->daemon_waiting);
    }
    return 0;
  });
  ASSERT_EQ(TimelineWait(shared_->client_word, TimelineValue(1, 100), shared_->daemon_waiting, kLimit),
            WaitResult::kReached);
  writer.Kill();
  ASSERT_EQ(writer.Wait(), 1000 + SIGKILL);
  const uint64_t last = shared_->client_word.load();
  EXPECT_EQ(TimelineWait(shared_->client_word, last + 1, shared_->daemon_waiting, absl::Milliseconds(20)),
            WaitResult::kTimedOut);
  TimelineStore(shared_->client_word, TimelineValue(2, 0), &shared_->daemon_waiting);
  EXPECT_EQ(TimelineWait(shared_->client_word, last + 1, shared_->daemon_waiting, -absl::InfiniteDuration()),
            WaitResult::kReached);
}

// The order that loses no wake, seen from outside: the first look at a page without access faults, and the handler sees
// what has been done by then. A stress test does not hit the few nanoseconds in which a wrong order matters.
void* guarded_page = nullptr;
TimelineWord* watched_word = nullptr;
std::atomic<uint32_t>* watched_waiting = nullptr;
uint64_t word_at_first_look = 0;
uint32_t waiting_at_first_look = 0;

void OpenGuardedPage(int) {
  word_at_first_look = watched_word == guarded_page ? 0 : watched_word->load();
  waiting_at_first_look = watched_waiting == guarded_page ? 0 : watched_waiting->load();
  if (mprotect(guarded_page, kPageBytes, PROT_READ) != 0) {
    _exit(3);
  }
}

void GuardPage() {
  guarded_page = mmap(nullptr, kPageBytes, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHILD_CHECK(guarded_page != MAP_FAILED);
  CHILD_CHECK(signal(SIGSEGV, OpenGuardedPage) != SIG_ERR);
}

TEST_F(TimelineTest, WriterStoresBeforeItLooksForSleepers) {
  Child writer([this] {
    GuardPage();
    watched_word = &shared_->daemon_word;
    watched_waiting = static_cast<std::atomic<uint32_t>*>(guarded_page);
    TimelineStore(*watched_word, 7, watched_waiting);
    return static_cast<int>(word_at_first_look);
  });
  EXPECT_EQ(writer.Wait(), 7);
}

TEST_F(TimelineTest, WaiterRaisesItsFlagBeforeItsLastLook) {
  Child waiter([this] {
    GuardPage();
    watched_word = static_cast<TimelineWord*>(guarded_page);
    watched_waiting = &shared_->client_waiting;
    CHILD_CHECK(shm_internal::TimelineWaitSliced(*watched_word, 1, *watched_waiting, absl::ZeroDuration(),
                                                 absl::ZeroDuration(), absl::Hours(1)) == WaitResult::kTimedOut);
    return static_cast<int>(waiting_at_first_look);
  });
  EXPECT_EQ(waiter.Wait(), 1);
}

// What was written before the store is there after the wait: the data behind a timeline needs nothing else. Threads and
// not processes, so that a thread sanitizer can see it.
TEST_F(TimelineTest, DataWrittenBeforeTheStoreIsSeenAfterTheWait) {
  constexpr uint64_t kRounds = 2'000;
  int64_t data[2] = {0, 0};
  std::thread client([&] {
    for (uint64_t n = 1; n <= kRounds; ++n) {
      ASSERT_EQ(TimelineWait(shared_->daemon_word, n, shared_->client_waiting, kLimit), WaitResult::kReached);
      ASSERT_EQ(data[0], static_cast<int64_t>(n));
      data[1] = data[0] * 2;
      TimelineStore(shared_->client_word, n, &shared_->daemon_waiting);
    }
  });
  for (uint64_t n = 1; n <= kRounds; ++n) {
    data[0] = static_cast<int64_t>(n);
    TimelineStore(shared_->daemon_word, n, &shared_->client_waiting);
    ASSERT_EQ(TimelineWait(shared_->client_word, n, shared_->daemon_waiting, kLimit), WaitResult::kReached);
    ASSERT_EQ(data[1], static_cast<int64_t>(n) * 2);
  }
  client.join();
}

TEST_F(TimelineTest, ThreadsOfOneClientSleepAtOnceAndAllWake) {
  std::vector<std::thread> threads;
  for (uint64_t target = 1; target <= 3; ++target) {
    threads.emplace_back([this, target] {
      EXPECT_EQ(shm_internal::TimelineWaitSliced(shared_->daemon_word, target, shared_->client_waiting, kLimit,
                                                 absl::ZeroDuration(), absl::Hours(1)),
                WaitResult::kReached);
    });
  }
  ASSERT_TRUE(testing::PollUntil([this] { return shared_->client_waiting == 3; }));
  for (uint64_t n = 1; n <= 3; ++n) {
    TimelineStore(shared_->daemon_word, n, &shared_->client_waiting);
    ASSERT_TRUE(testing::PollUntil([this, n] { return shared_->client_waiting == 3 - n; }));
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace shardd
