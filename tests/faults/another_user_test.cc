// Jobs belong to the user who opened them.

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::faults {
namespace {

using testing::RunAsUid;

constexpr uint32_t kStranger = 12345;
constexpr gid_t kViewGroup = 23456;

class AnotherUser : public BadInput {
 protected:
  void SetUp() override {
    if (geteuid() != 0) {
      GTEST_SKIP() << "being another user as well needs root (uid " << geteuid() << ")";
    }
  }
  // As an operator may have it who lets several users in; the daemon's own mode keeps others out.
  void OpenTheDoor() {
    const std::string folder = socket().substr(0, socket().rfind('/'));
    ASSERT_EQ(chmod(folder.c_str(), 0711), 0);
    ASSERT_EQ(chmod(socket().c_str(), 0666), 0);
  }
  // Through that door.
  UniqueFd ConnectAsStranger() {
    OpenTheDoor();
    UniqueFd connected;
    RunAsUid(kStranger, [&] { connected = ConnectTo(socket()); });
    return connected;
  }
};

TEST_F(AnotherUser, IsKeptOutByTheModeOfTheSocket) {
  StartDaemonWithJob();
  const std::string folder = socket().substr(0, socket().rfind('/'));
  ASSERT_EQ(chmod(folder.c_str(), 0711), 0);
  int error = 0;
  RunAsUid(kStranger, [&] {
    const UniqueFd connected = ConnectTo(socket());
    error = connected.valid() ? 0 : errno;
  });
  EXPECT_EQ(error, EACCES);
  ExpectJobIntact();
}

TEST_F(AnotherUser, ReachesNothingOfTheJob) {
  StartDaemonWithJob();
  OpenTheDoor();
  {
    RawClient owner(socket());
    ASSERT_TRUE(owner.Enter(SpecOf(job_), 0).ok());
    const uint64_t job_id = Job().job_id();
    const uint64_t aborts = Job().counters().aborts();
    const uint64_t session_id = owner.session().session_id();
    const std::string token = owner.session().token();

    UniqueFd connected;
    absl::Status fds;
    RunAsUid(kStranger, [&] {
      connected = ConnectTo(socket());
      fds = FetchSessionFds(socket(), session_id, token, testing::kLimit).status();  // stolen, and right
    });
    ExpectStatus(fds, absl::StatusCode::kPermissionDenied, "no such session, or wrong token");
    ASSERT_TRUE(connected.valid());
    RawClient stranger(socket(), std::move(connected));

    ExpectStatus(stranger.Attach(job_id, 0).status(), absl::StatusCode::kNotFound, "no such job");
    ExpectStatus(stranger.Attach(job_id, 0, /*replace=*/true).status(), absl::StatusCode::kNotFound, "no such job");
    ExpectStatus(stranger.Close(job_id), absl::StatusCode::kPermissionDenied, "another user");
    {
      RawStream stolen(stranger.stub());
      stolen.Hello(session_id, token);
      v1::SessionRequest detach;
      detach.mutable_detach()->set_finished(true);
      stolen.Write(detach);
      ExpectStatus(stolen.End(), absl::StatusCode::kUnauthenticated, "no such session, or wrong token");
    }

    using Jobs = v1::JobsService::Stub;
    v1::JobRef ref;
    ref.set_job("job");
    v1::ListRanksResponse ranks;
    ExpectStatus(stranger.Ask(&Jobs::ListRanks, ref, &ranks), absl::StatusCode::kNotFound, "no job");
    v1::ListGroupsResponse groups;
    ExpectStatus(stranger.Ask(&Jobs::ListGroups, ref, &groups), absl::StatusCode::kNotFound, "no job");
    v1::ListParametersResponse parameters;
    ExpectStatus(stranger.Ask(&Jobs::ListParameters, ref, &parameters), absl::StatusCode::kNotFound, "no job");
    v1::Memory memory;
    ExpectStatus(stranger.Ask(&Jobs::GetMemory, ref, &memory), absl::StatusCode::kNotFound, "no job");
    v1::TraceJobRequest traced;
    traced.set_job("job");
    ExpectStatus(stranger.Trace(traced), absl::StatusCode::kNotFound, "no job");
    ref.set_uid(0);  // whose it is
    ExpectStatus(stranger.Ask(&Jobs::ListRanks, ref, &ranks), absl::StatusCode::kNotFound, "no job");
    // What lists says nothing of it, and to close what is not there is no error.
    v1::ListJobsResponse jobs;
    EXPECT_TRUE(stranger.Ask(&Jobs::ListJobs, v1::ListJobsRequest(), &jobs).ok());
    EXPECT_EQ(jobs.jobs_size(), 0) << jobs.ShortDebugString();
    v1::ListStreamsResponse streams;
    EXPECT_TRUE(stranger.Ask(&Jobs::ListStreams, v1::ListStreamsRequest(), &streams).ok());
    for (const v1::Stream& stream : streams.streams()) {
      EXPECT_TRUE(stream.submitted() == 0 && stream.busy_us() == 0) << stream.ShortDebugString();
    }
    v1::GetMetricsResponse metrics;
    EXPECT_TRUE(stranger.Ask(&Jobs::GetMetrics, v1::GetMetricsRequest(), &metrics).ok());
    EXPECT_EQ(metrics.jobs_size() + metrics.daemon().quotas_size(), 0) << metrics.ShortDebugString();
    for (const v1::Stream& stream : metrics.daemon().streams()) {
      EXPECT_TRUE(stream.submitted() == 0 && stream.busy_us() == 0) << stream.ShortDebugString();
    }
    v1::ListEventsRequest which;
    which.set_limit(1000);
    v1::ListEventsResponse events;
    EXPECT_TRUE(stranger.Ask(&Jobs::ListEvents, which, &events).ok());
    EXPECT_EQ(events.events_size(), 0) << events.ShortDebugString();
    v1::CloseJobByNameResponse closed;
    EXPECT_TRUE(stranger.Ask(&Jobs::CloseJobByName, ref, &closed).ok());
    EXPECT_FALSE(closed.existed());

    EXPECT_EQ(Ranks()[0].session_id(), session_id);
    EXPECT_EQ(Job().counters().aborts(), aborts);
    owner.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    EXPECT_TRUE(owner.Consumed());  // its session is what it was
  }
  ExpectJobIntact();
}

// --view_group: its members ask for everything and change nothing.
TEST_F(AnotherUser, OfTheViewGroupSeesAllAndChangesNothing) {
  StartDaemonWithJob({absl::StrCat("--view_group=", kViewGroup)});
  OpenTheDoor();
  std::vector<gid_t> many(100);  // more than fit where they are asked for first
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<gid_t>(30000 + i);
  many.push_back(kViewGroup);
  using Jobs = v1::JobsService::Stub;
  v1::JobRef ref;
  ref.set_job("job");
  for (const std::vector<gid_t>& groups : {std::vector<gid_t>{}, {kViewGroup}, many}) {
    UniqueFd connected;
    RunAsUid(
        kStranger, [&] { connected = ConnectTo(socket()); }, groups);
    ASSERT_TRUE(connected.valid());
    RawClient viewer(socket(), std::move(connected));
    v1::ListJobsResponse jobs;
    ASSERT_TRUE(viewer.Ask(&Jobs::ListJobs, v1::ListJobsRequest(), &jobs).ok());
    v1::GetMetricsResponse metrics;
    ASSERT_TRUE(viewer.Ask(&Jobs::GetMetrics, v1::GetMetricsRequest(), &metrics).ok());
    if (groups.empty()) {
      EXPECT_EQ(jobs.jobs_size() + metrics.jobs_size(), 0);
      continue;
    }
    ASSERT_EQ(jobs.jobs_size(), 1);
    EXPECT_EQ(jobs.jobs(0).uid(), 0u);
    EXPECT_EQ(metrics.jobs_size(), 1);
    EXPECT_EQ(metrics.daemon().quotas_size(), 1);
    v1::ListRanksResponse ranks;
    EXPECT_TRUE(viewer.Ask(&Jobs::ListRanks, ref, &ranks).ok());
    v1::ListEventsRequest which;
    which.set_limit(1000);
    v1::ListEventsResponse events;
    EXPECT_TRUE(viewer.Ask(&Jobs::ListEvents, which, &events).ok());
    EXPECT_GT(events.events_size(), 0);

    v1::CloseJobByNameResponse closed;
    ExpectStatus(viewer.Ask(&Jobs::CloseJobByName, ref, &closed), absl::StatusCode::kPermissionDenied,
                 "may ask and change nothing");
    v1::HandOverResponse handed_over;
    ExpectStatus(viewer.Ask(&Jobs::HandOver, v1::HandOverRequest(), &handed_over), absl::StatusCode::kPermissionDenied,
                 "daemon's own user and root");
    ExpectStatus(viewer.Close(jobs.jobs(0).job_id()), absl::StatusCode::kPermissionDenied, "another user");
    ExpectStatus(viewer.Attach(jobs.jobs(0).job_id(), 0).status(), absl::StatusCode::kNotFound, "no such job");
    // Its own it closes as anybody does.
    const auto opened = viewer.Open(SpecOf({{"name", "its_own"}, {"world", "1"}}));
    ASSERT_TRUE(opened.ok()) << opened.status();
    v1::JobRef own;
    own.set_job("its_own");
    EXPECT_TRUE(viewer.Ask(&Jobs::CloseJobByName, own, &closed).ok());
    EXPECT_TRUE(closed.existed());
  }
  ExpectJobIntact();
}

// What a user may not do to others it may do beside them.
TEST_F(AnotherUser, HasJobsOfItsOwn) {
  StartDaemonWithJob();
  UniqueFd connected = ConnectAsStranger();
  ASSERT_TRUE(connected.valid());
  {
    RawClient stranger(socket(), std::move(connected));
    const auto opened = stranger.Open(SpecOf({{"name", "its_own"}, {"world", "1"}}));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(stranger.Attach(opened->job_id(), 0).ok());
    EXPECT_EQ(Job("its_own").uid(), kStranger);
    // The daemon's user closes anybody's.
    EXPECT_TRUE(RawClient(socket()).Close(opened->job_id()).ok());
    EXPECT_EQ(Job("its_own").name(), "");
  }
  ExpectJobIntact();
}

// A name is one user's, so that nobody takes another's.
TEST_F(AnotherUser, HasAJobOfTheSameName) {
  StartDaemonWithJob();
  UniqueFd connected = ConnectAsStranger();
  ASSERT_TRUE(connected.valid());
  {
    RawClient stranger(socket(), std::move(connected));
    RawClient root(socket());
    using Jobs = v1::JobsService::Stub;
    const auto opened = stranger.Open(SpecOf(job_));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(opened->created());
    EXPECT_TRUE(stranger.Attach(opened->job_id(), 0).ok());
    v1::JobRef ref;
    ref.set_job("job");
    v1::ListRanksResponse ranks;
    ASSERT_TRUE(stranger.Ask(&Jobs::ListRanks, ref, &ranks).ok());
    EXPECT_NE(ranks.ranks(0).session_id(), 0u) << "its own";

    // Who sees both says which.
    const std::string both = absl::StrCat("several users have one of that name (uid 0, uid ", kStranger, ")");
    ExpectStatus(root.Ask(&Jobs::ListRanks, ref, &ranks), absl::StatusCode::kInvalidArgument, both);
    v1::TraceJobRequest traced;
    traced.set_job("job");
    ExpectStatus(root.Trace(traced), absl::StatusCode::kInvalidArgument, both);
    v1::CloseJobByNameResponse closed;
    ExpectStatus(root.Ask(&Jobs::CloseJobByName, ref, &closed), absl::StatusCode::kInvalidArgument, "shardctl: --uid");
    ref.set_uid(0);
    ASSERT_TRUE(root.Ask(&Jobs::ListRanks, ref, &ranks).ok());
    EXPECT_EQ(ranks.ranks(0).session_id(), 0u);
    ref.set_uid(kStranger + 1);
    ExpectStatus(root.Ask(&Jobs::ListRanks, ref, &ranks), absl::StatusCode::kNotFound, "no job");
    v1::ListEventsRequest which;
    which.set_job("job");
    which.set_uid(kStranger);
    v1::ListEventsResponse events;
    EXPECT_TRUE(root.Ask(&Jobs::ListEvents, which, &events).ok());
    EXPECT_EQ(events.events_size(), 1) << "that it was opened: " << events.ShortDebugString();
    ref.set_uid(kStranger);
    EXPECT_TRUE(root.Ask(&Jobs::CloseJobByName, ref, &closed).ok());
    EXPECT_TRUE(closed.existed());
    EXPECT_TRUE(root.Ask(&Jobs::CloseJobByName, ref, &closed).ok());
    EXPECT_FALSE(closed.existed());
  }
  ExpectJobIntact();
}

TEST_F(AnotherUser, HasAQuotaOfJobsOfItsOwn) {
  StartDaemonWithJob({"--max_jobs_per_uid=1"});
  UniqueFd connected = ConnectAsStranger();
  ASSERT_TRUE(connected.valid());
  RawClient stranger(socket(), std::move(connected));
  const v1::JobSpec first = SpecOf({{"name", "first"}, {"world", "1"}});
  const v1::JobSpec second = SpecOf({{"name", "second"}, {"world", "1"}});
  EXPECT_TRUE(stranger.Open(first).ok());
  ExpectStatus(stranger.Open(second).status(), absl::StatusCode::kResourceExhausted,
               absl::StrCat("too many jobs of uid ", kStranger));
  ExpectStatus(RawClient(socket()).Open(second).status(), absl::StatusCode::kResourceExhausted,
               "too many jobs of uid 0");
  EXPECT_EQ(Job().committed_step(), 5);
}

}  // namespace
}  // namespace shardd::faults
