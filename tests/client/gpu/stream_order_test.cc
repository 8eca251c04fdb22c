// Order by a program's stream, on the fake driver in this process: the words are this test's own.

#include "client/c/gpu/stream_order.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "tests/fakes/cuda/machine.h"

namespace shardd {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(60);

class StreamOrderTest : public ::testing::Test {
 protected:
  StreamOrderTest() : driver_(fake_cuda::Table()) {
    (void)driver_->Init(0);
    (void)driver_->DevicePrimaryCtxRetain(&context_, 0);
    (void)driver_->CtxPushCurrent(context_);
    pages_ = static_cast<char*>(mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  ~StreamOrderTest() override {
    go_ = true;
    if (order_ != nullptr) {
      EXPECT_TRUE(order_->Drain(/*release=*/true, kLimit));
      order_ = nullptr;
    }
    for (CUstream stream : streams_) (void)driver_->StreamDestroy(stream);
    CUcontext popped;
    (void)driver_->CtxPopCurrent(&popped);
    (void)driver_->DevicePrimaryCtxRelease(0);
    munmap(pages_, 2 * kPage);
  }
  StreamOrder& Make(absl::Duration timeout = kLimit, uint64_t epoch = 3) {
    StreamOrder::Options options;
    options.driver = &driver_;
    options.rank = 1;
    options.epoch = epoch_ = epoch;
    options.client_page = &client();
    options.daemon_page = pages_ + kPage;
    options.daemon_page_bytes = kPage;
    options.timeout = timeout;
    options.over = [this] { return over_.load(); };
    absl::StatusOr<std::unique_ptr<StreamOrder>> order = StreamOrder::Create(options);
    EXPECT_TRUE(order.ok()) << order.status();
    order_ = *std::move(order);
    return *order_;
  }
  CUstream NewStream() {
    streams_.push_back(nullptr);
    EXPECT_EQ(driver_->StreamCreateWithPriority(&streams_.back(), CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    return streams_.back();
  }
  // A kernel that runs until go_.
  void Hang(CUstream stream) {
    const auto run = [](void* go) {
      while (!static_cast<std::atomic<bool>*>(go)->load()) usleep(100);
    };
    EXPECT_EQ(driver_->LaunchHostFunc(stream, run, &go_), CUDA_SUCCESS);
  }
  bool Drains(CUstream stream) {
    const absl::Time end = absl::Now() + kLimit;
    while (driver_->StreamQuery(stream) == CUDA_ERROR_NOT_READY && absl::Now() < end) usleep(100);
    return driver_->StreamQuery(stream) == CUDA_SUCCESS;
  }
  absl::StatusOr<uint64_t> Signal() {
    return order_->Signal("submit_gradients", [] { return absl::OkStatus(); });
  }
  ClientPage& client() { return *reinterpret_cast<ClientPage*>(pages_); }
  TimelineWord& word() { return reinterpret_cast<DaemonPage*>(pages_ + kPage)->version; }
  uint64_t Value(uint64_t sequence) const { return TimelineValue(epoch_, sequence); }

  static constexpr int64_t kPage = 4096;
  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  CUcontext context_ = nullptr;
  char* pages_ = nullptr;
  uint64_t epoch_ = 0;
  std::atomic<bool> go_ = false, over_ = false;
  std::vector<CUstream> streams_;
  std::unique_ptr<StreamOrder> order_;
};

TEST_F(StreamOrderTest, SignalsComeBehindEveryStreamThatWasNamed) {
  StreamOrder& order = Make();
  const CUstream first = NewStream(), second = NewStream();
  ASSERT_TRUE(order.Use(first).ok());
  Hang(first);
  EXPECT_EQ(*Signal(), 1u);
  ASSERT_TRUE(order.Use(second).ok());  // nothing is in it, but it is behind the first from now on
  EXPECT_EQ(*Signal(), 2u);
  usleep(20000);
  EXPECT_EQ(client().done.load(), 0u);
  EXPECT_EQ(driver_->StreamQuery(second), CUDA_ERROR_NOT_READY);
  go_ = true;
  EXPECT_TRUE(Drains(second));
  EXPECT_TRUE(order.Drain(/*release=*/false, kLimit));
  EXPECT_EQ(client().done.load(), Value(2));
}

TEST_F(StreamOrderTest, NullMeansTheLegacyStreamAndPerThreadIsRefused) {
  StreamOrder& order = Make();
  const absl::Status refused = order.Use(CU_STREAM_PER_THREAD);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(refused.message(), "another stream in every thread")) << refused;
  ASSERT_TRUE(order.Use(nullptr).ok());
  ASSERT_TRUE(order.by_stream());
  ASSERT_TRUE(order.Await(word(), Value(1), "wait_unshard").ok());
  EXPECT_EQ(*Signal(), 1u);
  usleep(5000);
  EXPECT_EQ(driver_->StreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(client().done.load(), 0u) << "it is behind the wait";
  word() = Value(1);
  EXPECT_TRUE(Drains(nullptr));
  EXPECT_TRUE(order.Drain(/*release=*/false, kLimit));
  EXPECT_EQ(client().done.load(), Value(1));
  // Another stream, and back to it.
  const CUstream other = NewStream();
  ASSERT_TRUE(order.Use(other).ok());
  EXPECT_EQ(*Signal(), 2u);
  ASSERT_TRUE(order.Use(nullptr).ok());
  EXPECT_EQ(*Signal(), 3u);
  EXPECT_TRUE(order.Drain(/*release=*/false, kLimit));
  EXPECT_EQ(client().done.load(), Value(3));
}

TEST_F(StreamOrderTest, NoMoreWaitsThanTheLimitAreOutstanding) {
  StreamOrder& order = Make();
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  for (size_t i = 0; i < StreamOrder::kMaxWaits; ++i) {
    ASSERT_TRUE(order.MayAwait()) << i;
    ASSERT_TRUE(order.Await(word(), Value(1 + i), "wait_unshard").ok());
  }
  EXPECT_FALSE(order.MayAwait());
  word() = Value(1);
  EXPECT_TRUE(order.MayAwait());
  EXPECT_EQ(driver_->StreamQuery(stream), CUDA_ERROR_NOT_READY);
  word() = Value(StreamOrder::kMaxWaits);
  EXPECT_TRUE(Drains(stream));
}

TEST_F(StreamOrderTest, NoMoreSignalsThanTheLimitAreOutstanding) {
  StreamOrder& order = Make(absl::Milliseconds(200));
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  Hang(stream);
  for (uint64_t i = 1; i <= StreamOrder::kMaxSignals; ++i) ASSERT_EQ(*Signal(), i);
  const absl::Status status = Signal().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "submit_gradients: the program's stream 0x")) << status;
  go_ = true;
  ASSERT_TRUE(Drains(stream));
  EXPECT_EQ(*Signal(), StreamOrder::kMaxSignals + 1);
}

// Also where the sign bit of the word changes, and where the epoch wraps.
TEST_F(StreamOrderTest, TheNextEpochEndsAWait) {
  for (const uint64_t epoch : {uint64_t{1}, (uint64_t{1} << 23) - 1, (uint64_t{1} << 24) - 1}) {
    StreamOrder& order = Make(kLimit, epoch);
    word() = Value(7);
    const CUstream stream = NewStream();
    ASSERT_TRUE(order.Use(stream).ok());
    ASSERT_TRUE(order.Await(word(), Value(kTimelineSequenceMask), "wait_unshard").ok());
    usleep(5000);
    EXPECT_EQ(driver_->StreamQuery(stream), CUDA_ERROR_NOT_READY) << epoch;
    word() = TimelineValue(epoch + 1, 0);
    EXPECT_TRUE(Drains(stream)) << epoch;
    ASSERT_TRUE(order.Drain(/*release=*/true, kLimit));
    order_ = nullptr;
  }
}

// The daemon lives, and goes on to write what this epoch's words are.
TEST_F(StreamOrderTest, AWaitThatTakesTooLongEndsWhateverIsWritten) {
  StreamOrder& order = Make(absl::Milliseconds(100));
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  ASSERT_TRUE(order.Await(word(), Value(9), "wait_unshard group \"mid\": the unshard").ok());
  std::atomic<bool> ends = false;
  std::thread daemon([&] {
    for (uint64_t i = 0; !ends; ++i, usleep(300)) word() = Value(i % 8);
  });
  EXPECT_TRUE(Drains(stream));
  ends = true;
  daemon.join();
  EXPECT_TRUE(order.has_expired());
  EXPECT_EQ(client().is_void.load(), 1u) << "what the stream signals from now on does not count";
  const absl::Status status = order.expired();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  for (const char* part :
       {"wait_unshard group \"mid\": the unshard did not come to stream 0x", "within 100ms", "want 9", "rank=1"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }
  EXPECT_FALSE(order.MayAwait());
}

TEST_F(StreamOrderTest, TheEndOfTheSessionEndsItsWaits) {
  StreamOrder& order = Make();
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  ASSERT_TRUE(order.Await(word(), Value(9), "wait_unshard").ok());
  EXPECT_FALSE(order.Drain(/*release=*/false, absl::Milliseconds(20)));
  EXPECT_EQ(client().is_void.load(), 0u);
  over_ = true;  // the daemon is dead: nobody else writes
  EXPECT_TRUE(Drains(stream));
  EXPECT_FALSE(order.has_expired());
  EXPECT_EQ(client().is_void.load(), 1u);
}

// The daemon reads the signal first, then the word that says that no signal counts.
TEST_F(StreamOrderTest, SignalsBehindAnAbandonedWaitAreVoidBeforeTheyShow) {
  StreamOrder& order = Make(absl::Milliseconds(100));
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  ASSERT_TRUE(order.Await(word(), Value(9), "wait_unshard").ok());
  ASSERT_EQ(*Signal(), 1u);
  const absl::Time end = absl::Now() + kLimit;
  while (client().done.load() != Value(1) && absl::Now() < end) {
  }
  EXPECT_EQ(client().is_void.load(), 1u);
  EXPECT_TRUE(order.has_expired());
}

TEST_F(StreamOrderTest, ASessionThatEndsWithoutAWaitVoidsNothing) {
  StreamOrder& order = Make();
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  ASSERT_TRUE(order.Await(word(), Value(9), "wait_unshard").ok());
  ASSERT_EQ(*Signal(), 1u);
  word() = Value(9);
  EXPECT_TRUE(order.Drain(/*release=*/true, kLimit));
  EXPECT_EQ(client().is_void.load(), 0u) << "its signals are good to the last";
}

TEST_F(StreamOrderTest, IfTheDriverRefusesThePagesSignalsAwaitTheStream) {
  machine_.FailCall("cuMemHostRegister", 2, CUDA_ERROR_OUT_OF_MEMORY);
  StreamOrder& order = Make();
  EXPECT_FALSE(order.by_stream());
  EXPECT_TRUE(absl::StrContains(order.fallback().message(), "cuMemHostRegister")) << order.fallback();
  const CUstream stream = NewStream();
  ASSERT_TRUE(order.Use(stream).ok());
  Hang(stream);
  std::thread later([this] {
    usleep(50000);
    go_ = true;
  });
  EXPECT_EQ(*Signal(), 0u);
  EXPECT_TRUE(go_);
  later.join();
}

}  // namespace
}  // namespace shardd
