// What a trainer measures of its own calls.

#include <gtest/gtest.h>
#include <signal.h>

#include "client/c/shardd.h"
#include "common/shm/trace_ring.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

// Nobody waits for the ring: what finds no room is counted, and told with the next that does.
TEST(Trace, CallsThatFindTheRingFullAreCountedAndTold) {
  constexpr int kTooMany = 100;
  Daemon daemon;
  Rank rank;
  ASSERT_C_OK(rank.Attach(daemon.address(), SmallSpec("job", 1), 0));
  rank.WriteAll(1);
  rank.Unshard(0, SHARDD_FORWARD);
  const auto stub = v1::JobsService::NewStub(grpc::CreateChannel(daemon.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::TraceJobRequest request;
  request.set_job("job");
  const auto reader = stub->TraceJob(&context, request);
  v1::TraceJobResponse message;
  ASSERT_TRUE(reader->Read(&message));

  daemon.process().Kill(SIGSTOP);
  siginfo_t stopped;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(daemon.process().pid()), &stopped, WSTOPPED | WNOWAIT), 0);
  EXPECT_C_ERROR(shardd_reshard(rank.job(), 1), kFailedPrecondition, "not legal");  // measured too
  for (uint32_t i = 1; i < kTraceRecords + kTooMany; ++i) {
    ASSERT_C_OK(shardd_wait_unshard(rank.job(), 0));  // asks nobody
  }
  daemon.process().Kill(SIGCONT);

  int64_t spans = 0, failed = 0, lost = 0;
  const auto count = [&] {
    for (const v1::TraceSpan& span : message.spans().spans()) {
      ++spans;
      failed += span.failed() ? 1 : 0;
      lost += span.lost();
    }
  };
  while (spans < kTraceRecords && reader->Read(&message)) {
    count();
  }
  EXPECT_EQ(lost, 0);
  ASSERT_C_OK(shardd_wait_unshard(rank.job(), 0));
  CloseJob(daemon.address(), "job");
  while (reader->Read(&message)) {
    count();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(spans, kTraceRecords + 1);
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(lost, kTooMany);
  EXPECT_EQ(message.end().lost_spans(), kTooMany);
  EXPECT_EQ(message.end().refused_records(), 0);
}

}  // namespace
}  // namespace shardd::testing_client
