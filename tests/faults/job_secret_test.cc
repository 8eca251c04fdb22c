// A job with a secret belongs to those of its uid who give it: containers may share a uid.

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/versions/versions.h"
#include "tests/faults/bad_input.h"
#include "tests/faults/commands.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::faults {
namespace {

using Jobs = v1::JobsService::Stub;
using testing::RunAsUid;

constexpr uint32_t kOwner = 12345;
constexpr uint32_t kStranger = 12346;
constexpr char kSecret[] = "correct horse battery staple";
constexpr char kWrong[] = "correct horse battery stapler";
constexpr char kRemedy[] = "in SHARDD_JOB_SECRET or SHARDD_JOB_SECRET_FILE";

class JobSecretTest : public BadInput {
 protected:
  void RanksGive(const std::string& secret) {
    RanksFind(secret.empty() ? std::vector<std::string>() : std::vector<std::string>{"SHARDD_JOB_SECRET=" + secret});
  }
  // The daemon has told nobody: nothing that it has written or answers contains the secret.
  void ExpectUntold() {
    std::string all = testing::ReadWholeFile(File("daemon.log"));
    EXPECT_FALSE(all.empty());
    RawClient admin(socket());
    const auto add = [&](const absl::Status& status, const google::protobuf::Message& message) {
      EXPECT_TRUE(status.ok()) << status;
      absl::StrAppend(&all, message.ShortDebugString());
    };
    v1::ListJobsResponse jobs;
    add(admin.Ask(&Jobs::ListJobs, v1::ListJobsRequest(), &jobs), jobs);
    v1::ListEventsRequest which;
    which.set_limit(4096);
    v1::ListEventsResponse events;
    add(admin.Ask(&Jobs::ListEvents, which, &events), events);
    EXPECT_GT(events.events_size(), 0);
    for (const v1::Job& job : jobs.jobs()) {
      v1::JobRef ref;
      ref.set_job(job.name());
      v1::ListRanksResponse ranks;
      add(admin.Ask(&Jobs::ListRanks, ref, &ranks), ranks);
      v1::Memory memory;
      add(admin.Ask(&Jobs::GetMemory, ref, &memory), memory);
    }
    for (const absl::string_view secret : {kSecret, kWrong}) {
      EXPECT_FALSE(absl::StrContains(all, secret));
      EXPECT_FALSE(absl::StrContains(all, absl::Base64Escape(secret).substr(0, 30)));
      EXPECT_FALSE(absl::StrContains(all, absl::BytesToHexString(secret)));
    }
  }
};

TEST_F(JobSecretTest, WhoDoesNotGiveItNeitherOpensNorAttaches) {
  RanksGive(kSecret);
  StartDaemonWithJob();
  ASSERT_TRUE(Job().has_secret());
  const uint64_t job_id = Job().job_id();
  {
    RawClient owner(socket());
    owner.Gives(kSecret);
    ASSERT_TRUE(owner.Enter(SpecOf(job_), 0).ok());
    const uint64_t session_id = Ranks()[0].session_id();
    for (const char* secret : {"", kWrong}) {
      RawClient other(socket());
      other.Gives(secret);
      const char* given = secret[0] == '\0' ? "none was given" : "another one was given";
      for (const absl::Status& status :
           {other.Open(SpecOf(job_)).status(), other.Attach(job_id, 0).status(),
            other.Attach(job_id, 0, /*replace=*/true).status(), other.Attach(job_id, 77).status()}) {
        ExpectStatus(status, absl::StatusCode::kPermissionDenied, given);
        ExpectStatus(status, absl::StatusCode::kPermissionDenied, kRemedy);
      }
    }
    EXPECT_EQ(Ranks()[0].session_id(), session_id);
    owner.Send(Record(Opcode::kUnshard, 0, v1::PHASE_FORWARD));
    EXPECT_TRUE(owner.Consumed());  // its session is what it was
  }
  ExpectUntold();
  ExpectJobIntact();
}

// --view_group sees it without the secret, as administrators do, and closes it no more than others do.
TEST_F(JobSecretTest, TheViewGroupSeesTheJobAndClosesNone) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "being another user as well needs root (uid " << geteuid() << ")";
  }
  constexpr gid_t kViewGroup = 23456;
  StartDaemon({absl::StrCat("--view_group=", kViewGroup)});
  ASSERT_EQ(chmod(socket().substr(0, socket().rfind('/')).c_str(), 0711), 0);
  ASSERT_EQ(chmod(socket().c_str(), 0666), 0);
  const auto connect = [this](uint32_t uid, const std::vector<gid_t>& groups) {
    UniqueFd connected;
    RunAsUid(
        uid, [&] { connected = ConnectTo(socket()); }, groups);
    return std::make_unique<RawClient>(socket(), std::move(connected));
  };
  const auto owner = connect(kOwner, {});
  owner->Gives(kSecret);
  ASSERT_TRUE(owner->Open(SpecOf(job_)).ok());
  v1::JobRef ref;
  ref.set_job("job");
  v1::ListRanksResponse ranks;
  v1::CloseJobByNameResponse closed;
  for (const uint32_t uid : {kOwner, kStranger}) {
    const auto viewer = connect(uid, {kViewGroup});
    EXPECT_TRUE(viewer->Ask(&Jobs::ListRanks, ref, &ranks).ok()) << uid;
    ExpectStatus(viewer->Ask(&Jobs::CloseJobByName, ref, &closed), absl::StatusCode::kPermissionDenied,
                 uid == kOwner ? "none was given" : "may ask and change nothing");
    const auto other = connect(uid, {});
    EXPECT_FALSE(other->Ask(&Jobs::ListRanks, ref, &ranks).ok()) << uid;
  }
}

TEST_F(JobSecretTest, AReplacementGivesItToo) {
  StartDaemon();
  RanksGive(kSecret);
  const e2e::Args args = {{"steps", "10"}, {"recover", "1"}};
  testing::Child other = StartRank(0, args);
  testing::Child killed = StartRank(1, args.With({{"kill", "before_step@5"}}));
  EXPECT_EQ(killed.Wait(), 1000 + SIGKILL);
  for (const char* secret : {"", kWrong}) {
    RanksGive(secret);
    testing::Child refused = StartRank(1, args.With({{"replace", "1"}}));
    refused.Wait();
    EXPECT_EQ(Report(args, 1).code, static_cast<int>(absl::StatusCode::kPermissionDenied));
    EXPECT_TRUE(absl::StrContains(Report(args, 1).message, kRemedy)) << Report(args, 1).message;
  }
  RanksGive(kSecret);
  testing::Child right = StartRank(1, args.With({{"replace", "1"}}));
  EXPECT_EQ(right.Wait(), 0);
  EXPECT_EQ(other.Wait(), 0);
  const std::vector<e2e::TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  EXPECT_EQ(reports[1].Note("attached"), "attached 5");
  ExpectUntold();
  ExpectSame(reports, RunRanks(args.With({{"name", "undisturbed"}})));
}

// Or a program that gives one would take a job for its own that others have prepared, or may enter.
TEST_F(JobSecretTest, AJobWithoutOneIsNoneOfWhoGivesOne) {
  StartDaemonWithJob();
  EXPECT_FALSE(Job().has_secret());
  RawClient client(socket());
  client.Gives(kSecret);
  ExpectStatus(client.Open(SpecOf(job_)).status(), absl::StatusCode::kFailedPrecondition,
               "it was opened without a secret and this rank gives one");
  EXPECT_FALSE(Job().has_secret());
  ExpectJobIntact();
}

// A rank that is refused is told to those who wait for it, but not one of somebody else's.
TEST_F(JobSecretTest, NobodyWaitsForARankWithoutTheSecret) {
  StartDaemon();
  const v1::JobSpec spec = SpecOf({{"world", "2"}});
  RawClient owner(socket());
  owner.Gives(kSecret);
  ASSERT_TRUE(owner.Enter(spec, 0).ok());
  v1::OpenJobRequest bad;
  bad.set_protocol_version(kProtocolVersions.newest);
  bad.set_rank(1);
  *bad.mutable_spec() = spec;
  bad.mutable_spec()->set_world_size(-1);
  RawClient other(socket());
  ExpectStatus(other.Open(bad).status(), absl::StatusCode::kInvalidArgument, "world");
  EXPECT_FALSE(HasEvent("job", "refused", ""));
  other.Gives(kSecret);
  ExpectStatus(other.Open(bad).status(), absl::StatusCode::kInvalidArgument, "world");
  EXPECT_TRUE(testing::PollUntil([&] { return HasEvent("job", "refused", ""); }));
}

// Callers that are no administrators need another uid than the daemon's.
class JobSecretOfAUserTest : public JobSecretTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) {
      GTEST_SKIP() << "being another user as well needs root (uid " << geteuid() << ")";
    }
    StartDaemon();
    const std::string folder = socket().substr(0, socket().rfind('/'));
    ASSERT_EQ(chmod(folder.c_str(), 0711), 0);
    ASSERT_EQ(chmod(socket().c_str(), 0666), 0);
  }
  std::unique_ptr<RawClient> As(uint32_t uid, const std::string& secret = "") {
    UniqueFd connected;
    RunAsUid(uid, [&] { connected = ConnectTo(socket()); });
    auto client = std::make_unique<RawClient>(socket(), std::move(connected));
    client->Gives(secret);
    return client;
  }
  // Every call that names the job ends so.
  static void ExpectReads(RawClient& client, absl::StatusCode code, const std::string& text) {
    v1::JobRef ref;
    ref.set_job("job");
    v1::ListRanksResponse ranks;
    ExpectStatus(client.Ask(&Jobs::ListRanks, ref, &ranks), code, text);
    v1::ListGroupsResponse groups;
    ExpectStatus(client.Ask(&Jobs::ListGroups, ref, &groups), code, text);
    v1::ListParametersResponse parameters;
    ExpectStatus(client.Ask(&Jobs::ListParameters, ref, &parameters), code, text);
    v1::Memory memory;
    ExpectStatus(client.Ask(&Jobs::GetMemory, ref, &memory), code, text);
  }
  // How many jobs and events the client is shown.
  static std::pair<int, int> Shown(RawClient& client) {
    v1::ListJobsResponse jobs;
    EXPECT_TRUE(client.Ask(&Jobs::ListJobs, v1::ListJobsRequest(), &jobs).ok());
    v1::ListEventsResponse events;
    EXPECT_TRUE(client.Ask(&Jobs::ListEvents, v1::ListEventsRequest(), &events).ok());
    return {jobs.jobs_size(), events.events_size()};
  }
  static bool SeesWork(RawClient& client) {
    v1::ListStreamsResponse streams;
    EXPECT_TRUE(client.Ask(&Jobs::ListStreams, v1::ListStreamsRequest(), &streams).ok());
    return std::any_of(streams.streams().begin(), streams.streams().end(),
                       [](const v1::Stream& stream) { return stream.submitted() > 0; });
  }
};

TEST_F(JobSecretOfAUserTest, TheUidAloneReadsAndClosesNothing) {
  const std::unique_ptr<RawClient> owner = As(kOwner, kSecret);
  const auto opened = owner->Open(SpecOf(job_));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const uint64_t job_id = opened->job_id();
  ASSERT_TRUE(owner->Attach(job_id, 0).ok());
  v1::TraceJobRequest trace;
  trace.set_job("job");
  v1::JobRef ref;
  ref.set_job("job");
  v1::CloseJobByNameResponse closed;
  for (const char* secret : {"", kWrong}) {
    const std::unique_ptr<RawClient> other = As(kOwner, secret);
    ExpectReads(*other, absl::StatusCode::kPermissionDenied, kRemedy);
    ExpectStatus(other->Trace(trace), absl::StatusCode::kPermissionDenied, kRemedy);
    ExpectStatus(other->Close(job_id), absl::StatusCode::kPermissionDenied, kRemedy);
    ExpectStatus(other->Ask(&Jobs::CloseJobByName, ref, &closed), absl::StatusCode::kPermissionDenied, kRemedy);
    EXPECT_EQ(Shown(*other), std::pair(0, 0));
    EXPECT_FALSE(SeesWork(*other));
  }
  // To another uid it makes no difference whether there is such a job, or what it gives.
  for (const char* secret : {"", kSecret}) {
    const std::unique_ptr<RawClient> stranger = As(kStranger, secret);
    ExpectReads(*stranger, absl::StatusCode::kNotFound, "no job \"job\"");
    ExpectStatus(stranger->Trace(trace), absl::StatusCode::kNotFound, "no job \"job\"");
    ExpectStatus(stranger->Attach(job_id, 0).status(), absl::StatusCode::kNotFound, "no such job");
    EXPECT_TRUE(stranger->Ask(&Jobs::CloseJobByName, ref, &closed).ok());
    EXPECT_FALSE(closed.existed());
    EXPECT_EQ(Shown(*stranger), std::pair(0, 0));
  }
  ExpectReads(*owner, absl::StatusCode::kOk, "");
  EXPECT_EQ(Shown(*owner), std::pair(1, 1)) << "the job, and that it was opened";
  EXPECT_TRUE(owner->Close(job_id).ok());
  EXPECT_EQ(Job().name(), "");
  EXPECT_EQ(Shown(*As(kOwner)), std::pair(0, 0)) << "events of a job that is gone";
  EXPECT_EQ(Shown(*owner), std::pair(0, 2));
  ExpectUntold();
}

TEST_F(JobSecretOfAUserTest, AnAdministratorLooksAndClosesWithoutIt) {
  const std::unique_ptr<RawClient> owner = As(kOwner, kSecret);
  const auto opened = owner->Open(SpecOf(job_));
  ASSERT_TRUE(opened.ok()) << opened.status();
  RawClient admin(socket());
  ExpectReads(admin, absl::StatusCode::kOk, "");
  EXPECT_EQ(Shown(admin).first, 1);
  ExpectStatus(admin.Attach(opened->job_id(), 0).status(), absl::StatusCode::kNotFound, "no such job");
  EXPECT_TRUE(admin.Close(opened->job_id()).ok());
  EXPECT_EQ(Shown(admin).first, 0);
}

}  // namespace
}  // namespace shardd::faults
