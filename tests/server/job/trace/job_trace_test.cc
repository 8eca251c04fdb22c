#include "server/job/trace/job_trace.h"

#include "server/job/membership/gradient_writers.h"
#include "server/job/memory_account.h"
#include "server/observe/trace_sink.h"
#include "server/storage/job_memory.h"
#include "tests/server/job/facts_fixture.h"
#include "tests/server/job/writes/kept_work.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

class KeptTrace final : public TraceSink {
 public:
  void Prepare(const v1::TraceJobResponse&) override {}
  bool Send(const v1::TraceJobResponse& message) override {
    sent.push_back(message);
    return true;
  }
  void Finish(absl::Status) override { finished = true; }
  bool gone() const override { return false; }
  std::vector<v1::TraceJobResponse> sent;
  bool finished = false;
};

class JobTraceTest : public FactsTest {
 protected:
  JobTraceTest() : memory_(*JobMemory::Create(*plan_, "job")) { spec_.set_name("job"); }
  ~JobTraceTest() override {
    loop_.RunAndWait([this] { job_.alive = nullptr; });  // so that no timer finds the trace
  }
  void Begin(int64_t timeout_ms) {
    v1::TraceJobRequest request;
    request.set_timeout_ms(timeout_ms);
    loop_.RunAndWait([&] { trace_.Begin(request, sink_); });
  }
  bool OnLoop(const std::function<bool()>& condition) {
    bool result = false;
    loop_.RunAndWait([&] { result = condition(); });
    return result;
  }

  v1::JobSpec spec_;
  const std::unique_ptr<JobMemory> memory_;
  GradientWriters writers_of_gradients_{memory_.get()};
  MemoryAccount account_{
      {&spec_, plan_.get(), memory_.get(), &sessions_, &writers_of_gradients_, &snapshot_, &full_params_}, nullptr};
  KeptWork device_;
  std::vector<Device*> devices_{&device_, &device_};
  const std::shared_ptr<KeptTrace> sink_ = std::make_shared<KeptTrace>();
  JobTrace trace_{{"job", plan_, &devices_, &sessions_, &committed_, &account_,
                   [](int rank) { return rank == 0 ? "rank 1: Step" : ""; }},
                  /*measured=*/nullptr,
                  &work_};
};

TEST_F(JobTraceTest, BeginsWithTheJobItsDevicesAndItsProcesses) {
  Attach(1);
  sessions_[1]->peer.pid = 42;
  Begin(/*timeout_ms=*/60'000);
  ASSERT_EQ(sink_->sent.size(), 1u);
  const v1::TraceStart& start = sink_->sent[0].start();
  EXPECT_EQ(start.job(), "job");
  EXPECT_EQ(start.world_size(), 2);
  EXPECT_EQ(start.devices(1), "kept");
  EXPECT_EQ(start.pids(0), 0);
  EXPECT_EQ(start.pids(1), 42);
  EXPECT_EQ(start.memory().job(), "job");
}

TEST_F(JobTraceTest, WhoseTimeIsOverSaysForWhomRanksWait) {
  Begin(/*timeout_ms=*/1);
  ASSERT_TRUE(testing::PollUntil([&] { return OnLoop([&] { return sink_->finished; }); }));
  const v1::TraceEnd& end = sink_->sent.back().end();
  EXPECT_EQ(end.reason(), v1::TRACE_END_REASON_TIMEOUT);
  EXPECT_THAT(end.text(), ::testing::HasSubstr("; rank 0 waits for rank 1: Step"));
  EXPECT_THAT(end.text(), ::testing::Not(::testing::HasSubstr("rank 1 waits")));
  EXPECT_FALSE(trace_.on());
}

TEST_F(JobTraceTest, AStepSaysForWhomTheOthersWaited) {
  Attach(0);
  Begin(/*timeout_ms=*/60'000);
  loop_.RunAndWait([&] {
    trace_.Awaited(1, 1, absl::Milliseconds(30));
    trace_.Committed(1, sessions_.by_rank());
    trace_.Committed(2, sessions_.by_rank());  // in which nobody waited
    trace_.EndAll("closed");
  });
  std::vector<std::string> steps;
  for (const v1::TraceJobResponse& message : sink_->sent) {
    for (const v1::TraceSpan& span : message.spans().spans()) {
      if (span.kind() == v1::TRACE_KIND_STEP) steps.push_back(span.label());
    }
  }
  EXPECT_THAT(steps, ::testing::ElementsAre("others waited for rank 1, together 30ms", ""));
}

TEST_F(JobTraceTest, EndsWithTheJobAndIsNotPolledBehindIt) {
  Begin(/*timeout_ms=*/60'000);
  loop_.RunAndWait([&] { trace_.EndAll("closed"); });
  EXPECT_TRUE(sink_->finished);
  EXPECT_EQ(sink_->sent.back().end().reason(), v1::TRACE_END_REASON_JOB_ENDED);
  Begin(/*timeout_ms=*/60'000);
  job_.alive = nullptr;  // the timer that is set finds nobody
}

}  // namespace
}  // namespace shardd
