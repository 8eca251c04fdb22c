#include "client/c/session/stream_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

v1::Command Reshard(int group) {
  v1::Command command;
  command.mutable_reshard()->set_group(group);
  return command;
}

class StreamWriterTest : public ::testing::Test {
 protected:
  StreamWriterTest() {
    auto writer = StreamWriter::Start([this](const v1::SessionRequest& request) { return Write(request); });
    EXPECT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }
  ~StreamWriterTest() override {
    SetBlocked(false);
    EXPECT_TRUE(writer_->End(Deadline::Never()));
  }
  bool Write(const v1::SessionRequest& request) {
    absl::MutexLock lock(&mutex_);
    std::string text;
    for (const v1::Command& command : request.commands().commands()) text += std::to_string(command.reshard().group());
    written_.push_back(request.has_detach() ? "detach" : text);
    ++begun_;
    mutex_.Await(absl::Condition(
        +[](bool* blocked) { return !*blocked; }, &blocked_));
    return !broken_;
  }
  void SetBlocked(bool blocked) {
    absl::MutexLock lock(&mutex_);
    blocked_ = blocked;
  }
  bool AwaitWrites(int count) {
    return testing::PollUntil([&] {
      absl::MutexLock lock(&mutex_);
      return begun_ >= count;
    });
  }
  std::vector<std::string> written() {
    absl::MutexLock lock(&mutex_);
    return written_;
  }

  absl::Mutex mutex_;
  std::vector<std::string> written_ ABSL_GUARDED_BY(mutex_);
  int begun_ ABSL_GUARDED_BY(mutex_) = 0;
  bool blocked_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<StreamWriter> writer_;
};

TEST_F(StreamWriterTest, WhatIsNotUrgentWaitsForAMomentAlone) {
  const absl::Time begin = absl::Now();
  writer_->Push(Reshard(1), /*urgent=*/false);
  ASSERT_TRUE(AwaitWrites(1));
  EXPECT_GE(absl::Now() - begin, StreamWriter::kLinger);
  EXPECT_THAT(written(), ElementsAre("1"));
  writer_->Push(Reshard(2), /*urgent=*/false);
  writer_->Flush();
  writer_->Push(Reshard(3), /*urgent=*/true);
  EXPECT_TRUE(testing::PollUntil([this] {
    const std::vector<std::string> all = written();
    return std::accumulate(all.begin(), all.end(), std::string()) == "123";
  }));
}

TEST_F(StreamWriterTest, CallersWaitForNoWriteAndTheRestIsMerged) {
  SetBlocked(true);
  writer_->Push(Reshard(1), /*urgent=*/true);
  ASSERT_TRUE(AwaitWrites(1));
  for (int group = 2; group < 5; ++group) writer_->Push(Reshard(group), /*urgent=*/true);
  v1::SessionRequest detach;
  detach.mutable_detach();
  writer_->Push(std::move(detach));
  SetBlocked(false);
  ASSERT_TRUE(AwaitWrites(3));
  EXPECT_THAT(written(), ElementsAre("1", "234", "detach"));
}

TEST_F(StreamWriterTest, MessagesAreOfBoundedSize) {
  SetBlocked(true);
  writer_->Push(Reshard(1), /*urgent=*/true);
  ASSERT_TRUE(AwaitWrites(1));
  for (int i = 0; i < 3; ++i) {
    v1::Command large;
    large.mutable_step()->set_trainer_state(std::string(600 << 10, 'x'));
    writer_->Push(std::move(large), /*urgent=*/true);
  }
  SetBlocked(false);
  EXPECT_TRUE(AwaitWrites(4)) << "the daemon takes messages of 4 MiB";
}

TEST_F(StreamWriterTest, ABrokenStreamIsNotWrittenToAgain) {
  {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }
  writer_->Push(Reshard(1), /*urgent=*/true);
  ASSERT_TRUE(AwaitWrites(1));
  ASSERT_TRUE(writer_->End(Deadline::Never()));
  writer_->Push(Reshard(2), /*urgent=*/true);
  EXPECT_THAT(written(), ElementsAre("1"));
}

TEST_F(StreamWriterTest, AWriteUnderWayIsWaitedForUntilADeadline) {
  SetBlocked(true);
  writer_->Push(Reshard(1), /*urgent=*/true);
  ASSERT_TRUE(AwaitWrites(1));
  EXPECT_FALSE(writer_->End(Deadline::In(absl::Milliseconds(20))));
}

}  // namespace
}  // namespace shardd
