// Traces of a job of two trainers that train on: what ui.perfetto.dev gets is everything that happened, in order.

#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shm/trace_ring.h"
#include "common/status/grpc_status.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/cluster.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Far more than a test waits for: ranks are ended with it.
const Args kEndless = {{"steps", "1000000"}, {"recover", "1"}, {"wait_step", "1"}};
// Both ranks stop in their sixth step.
const Args kPaused = kEndless.With({{"pause", "backward_done@5"}});

// One TraceJob call.
class Tracing {
 public:
  Tracing(v1::JobsService::Stub& stub, int steps, absl::Duration timeout = testing::kLimit) {
    v1::TraceJobRequest request;
    request.set_job("job");
    request.set_steps(steps);
    request.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
    context_.set_deadline(absl::ToChronoTime(absl::Now() + 2 * testing::kLimit));
    reader_ = stub.TraceJob(&context_, request);
  }
  ~Tracing() { context_.TryCancel(); }
  bool Read() {
    v1::TraceJobResponse message;
    if (!reader_->Read(&message)) return false;
    if (message.has_start()) start = message.start();
    if (message.has_end()) end = message.end();
    spans.insert(spans.end(), message.spans().spans().begin(), message.spans().spans().end());
    return true;
  }
  absl::Status ReadAll() {
    while (Read()) {
    }
    return FromGrpcStatus(reader_->Finish());
  }
  v1::TraceStart start;
  v1::TraceEnd end;
  std::vector<v1::TraceSpan> spans;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::TraceJobResponse>> reader_;
};

class TraceTest : public Cluster {
 protected:
  void StartTraining() {
    StartDaemon();
    for (int rank = 0; rank < 2; ++rank) ranks_.push_back(StartRank(rank, kEndless));
    ASSERT_TRUE(testing::PollUntil([this] { return Job().committed_step() > 3; }));
  }
  void StartPaused(const Args& args = kPaused) {
    StartDaemon();
    for (int rank = 0; rank < 2; ++rank) ranks_.push_back(StartRank(rank, args));
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "backward_done", rank);
  }
  // Of every whole step each rank has unsharded, resharded and had reduced every group, and stepped, in its time.
  static void ExpectWhole(const Tracing& trace, int steps) {
    EXPECT_EQ(trace.end.reason(), v1::TRACE_END_REASON_STEPS) << trace.end.text();
    EXPECT_EQ(trace.end.last_step() - trace.end.first_step() + 1, steps);
    EXPECT_EQ(trace.end.lost_spans(), 0);
    EXPECT_EQ(trace.end.refused_records(), 0);
    const int64_t now_ns = TraceNowNs();
    std::set<std::tuple<std::string, int64_t, int, int>> seen;
    std::map<std::string, std::pair<int64_t, int64_t>> steps_of;  // "update step 12": from when to when that is
    for (const v1::TraceSpan& span : trace.spans) {
      EXPECT_GE(span.begin_ns(), trace.start.begin_ns());
      EXPECT_GE(span.end_ns(), span.begin_ns());
      EXPECT_LE(span.end_ns(), now_ns);
      EXPECT_FALSE(span.failed() && span.step() >= trace.end.first_step()) << v1::TraceCall_Name(span.call());
      if (span.kind() == v1::TRACE_KIND_STEP) {
        steps_of[absl::StrCat("update step ", span.step())] = {span.begin_ns(), span.end_ns()};
      }
      const std::string what =
          span.kind() == v1::TRACE_KIND_CALL ? v1::TraceCall_Name(span.call()) : v1::TraceKind_Name(span.kind());
      seen.insert({what, span.step(), span.rank(), span.group()});
    }
    std::map<std::string, int> updates;
    for (const v1::TraceSpan& span : trace.spans) {
      const auto step = steps_of.find(span.label());
      if (span.kind() == v1::TRACE_KIND_WORK && step != steps_of.end()) {
        ++updates[span.label()];
        EXPECT_GE(span.begin_ns(), step->second.first) << span.label();
        EXPECT_LE(span.end_ns(), step->second.second) << span.label();
      }
    }
    for (int64_t step = trace.end.first_step(); step <= trace.end.last_step(); ++step) {
      EXPECT_EQ(updates[absl::StrCat("update step ", step)], trace.start.world_size());
      EXPECT_EQ(seen.count({"TRACE_KIND_STEP", step, -1, -1}), 1u) << step;
      for (int rank = 0; rank < trace.start.world_size(); ++rank) {
        for (const char* what : {"TRACE_CALL_BACKWARD_DONE", "TRACE_CALL_STEP", "TRACE_CALL_WAIT_STEP"}) {
          EXPECT_EQ(seen.count({what, step, rank, -1}), 1u) << what << " of step " << step << " of rank " << rank;
        }
        for (int group = 0; group < trace.start.groups_size(); ++group) {
          EXPECT_EQ(seen.count({"TRACE_CALL_UNSHARD_BACKWARD", step, rank, group}),
                    trace.start.groups(group).name() == kGroupNames[kRoot] ? 0u : 1u)
              << trace.start.groups(group).name();
          for (const char* what : {"TRACE_CALL_UNSHARD_FORWARD", "TRACE_CALL_WAIT_UNSHARD", "TRACE_CALL_RESHARD",
                                   "TRACE_CALL_SUBMIT_GRADIENTS", "TRACE_KIND_REDUCE"}) {
            EXPECT_EQ(seen.count({what, step, rank, group}), 1u)
                << what << " of group \"" << trace.start.groups(group).name() << "\" in step " << step << " of rank "
                << rank;
          }
        }
      }
    }
  }

  std::vector<testing::Child> ranks_;
};

struct Event {
  double begin_us = 0;
  double end_us = 0;
  std::string name;
};
using Thread = std::pair<std::string, std::string>;  // names of process and thread

// The spans of the file by thread, in its order.
std::map<Thread, std::vector<Event>> ThreadsOf(const json& trace) {
  std::map<int64_t, std::string> processes;
  std::map<std::pair<int64_t, int64_t>, std::string> threads;
  std::map<Thread, std::vector<Event>> events;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "M") continue;
    const int64_t pid = event["pid"];
    const std::string name = event["args"].value("name", "");
    if (event["name"] == "process_name") processes[pid] = name;
    if (event["name"] == "thread_name") threads[{pid, event["tid"].get<int64_t>()}] = name;
  }
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const int64_t pid = event["pid"];
    const std::string process = processes[pid];
    const double begin = event["ts"];
    const double length = event["dur"];
    const std::string name = event["name"];
    events[{process.substr(0, process.find(',')), threads[{pid, event["tid"].get<int64_t>()}]}].push_back(
        {begin, begin + length, name});
  }
  return events;
}

TEST_F(TraceTest, TheFileShowsWhatEveryRankDidInOrder) {
  StartTraining();
  const std::string file = File("trace.json");
  testing::Child shardctl = testing::Spawn(
      {testing::ProgramPath("shardctl"), "trace", "job", "-o", file, "--steps", "4", "--address", socket()},
      {.log = File("ctl.log")});
  ASSERT_EQ(shardctl.Wait(2 * testing::kLimit), 0) << testing::ReadWholeFile(File("ctl.log"));
  EXPECT_THAT(testing::ReadWholeFile(File("ctl.log")), HasSubstr("4 whole steps"));
  EXPECT_THAT(testing::ReadWholeFile(File("ctl.log")), HasSubstr("ui.perfetto.dev"));

  const json trace = json::parse(testing::ReadWholeFile(file), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(trace.is_object());
  EXPECT_EQ(trace["otherData"]["lost_spans"], 0);
  const int64_t first = trace["otherData"]["first_whole_step"];
  const int64_t last = trace["otherData"]["last_whole_step"];
  ASSERT_EQ(last - first, 3);

  std::set<std::string> found;  // "rank 0: reduce mid, step 12"
  std::set<std::string> computed;
  double memory_bytes = 0;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "C" && event["name"] == "memory") memory_bytes = event["args"]["shards"];
    if (event["ph"] != "X" || !event["args"].contains("step")) continue;
    const std::string name = event["name"];
    const std::string rank = absl::StrCat("rank ", event["pid"].get<int>() - 100);
    found.insert(absl::StrCat(rank, ": ", name, ", step ", event["args"]["step"].get<int64_t>()));
    if (absl::StartsWith(name, "compute ")) computed.insert(rank + ": " + name);
  }
  EXPECT_GT(memory_bytes, 0);
  for (int rank = 0; rank < 2; ++rank) {
    for (const char* group : kGroupNames) {
      for (int64_t step = first; step <= last; ++step) {
        for (const char* what : {"unshard", "reshard", "submit gradients", "reduce"}) {
          const std::string want = absl::StrCat("rank ", rank, ": ", what, " ", group, ", step ", step);
          EXPECT_EQ(found.count(want), 1u) << want;
        }
      }
    }
    EXPECT_EQ(computed.count(absl::StrCat("rank ", rank, ": compute mid")), 1u);
  }

  const auto threads = ThreadsOf(trace);
  for (const auto& [thread, events] : threads) {
    for (size_t i = 1; i < events.size(); ++i) {
      EXPECT_GE(events[i].begin_us, events[i - 1].end_us - 1e-6)
          << thread.first << ", " << thread.second << ": " << events[i - 1].name << ", then " << events[i].name;
    }
  }
  for (const Thread& thread : std::vector<Thread>{{"job job", "steps"}, {"rank 0", "trainer"}, {"rank 1", "trainer"}}) {
    EXPECT_EQ(threads.count(thread), 1u) << thread.first << ", " << thread.second;
  }
  for (const char* device : {"device cpu:0", "device cpu:1"}) {  // each has its part of each reduction and update
    std::map<std::string, int> works;
    for (const char* stream : {"post_backward", "optimizer"}) {
      const auto found_events = threads.find({device, stream});
      ASSERT_NE(found_events, threads.end()) << device << " " << stream;
      for (const Event& event : found_events->second) ++works[event.name];
    }
    for (int64_t step = first; step <= last; ++step) {
      EXPECT_EQ(works[absl::StrCat("update step ", step)], 1) << device;
      EXPECT_GE(works[absl::StrCat("reduce mid step ", step)], 1) << device;
    }
  }
}

TEST_F(TraceTest, TwoTracersAtOnceGetAllOfTheirSteps) {
  StartTraining();
  Tracing one(jobs(), 3);
  Tracing other(jobs(), 5);
  ASSERT_TRUE(one.ReadAll().ok());
  ASSERT_TRUE(other.ReadAll().ok());
  ExpectWhole(one, 3);
  ExpectWhole(other, 5);
  Tracing later(jobs(), 0);  // after the others: the default
  ASSERT_TRUE(later.ReadAll().ok());
  ExpectWhole(later, 3);
}

TEST_F(TraceTest, MoreTracersThanAUserMayHaveAreRefused) {
  StartPaused();
  std::vector<std::unique_ptr<Tracing>> tracers;
  for (int i = 0; i < 8; ++i) {
    tracers.push_back(std::make_unique<Tracing>(jobs(), 1));
    ASSERT_TRUE(tracers.back()->Read());
  }
  const absl::Status status = Tracing(jobs(), 1).ReadAll();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("want less than 8 of uid"));
  tracers.pop_back();  // its reader goes away
  EXPECT_TRUE(testing::PollUntil([this] { return Tracing(jobs(), 1).Read(); }));
}

TEST_F(TraceTest, GoesOnWhileARankIsKilledAndReplaced) {
  StartPaused();
  Tracing trace(jobs(), 5);
  ASSERT_TRUE(trace.Read());
  LetGo(kPaused, "backward_done", 0);
  ASSERT_TRUE(trace.Read());  // rank 0's Step
  ranks_[1].Kill();
  ranks_.push_back(StartRank(1, kEndless));
  ASSERT_TRUE(trace.ReadAll().ok());
  ExpectWhole(trace, 5);
  std::set<uint64_t> epochs;
  for (const v1::TraceSpan& span : trace.spans) {
    if (span.kind() == v1::TRACE_KIND_CALL) epochs.insert(span.epoch());
  }
  EXPECT_GE(epochs.size(), 2u);
}

TEST_F(TraceTest, AnEndedJobsTraceSaysSoAndKeepsItsSteps) {
  StartPaused(kPaused.With({{"steps", "12"}}));
  Tracing trace(jobs(), 1000);
  ASSERT_TRUE(trace.Read());
  for (int rank = 0; rank < 2; ++rank) LetGo(kPaused, "backward_done", rank);
  ASSERT_TRUE(trace.ReadAll().ok());
  EXPECT_EQ(trace.end.reason(), v1::TRACE_END_REASON_JOB_ENDED);
  EXPECT_THAT(trace.end.text(), HasSubstr("finished"));
  EXPECT_EQ(trace.end.first_step(), 7);  // it began in the sixth
  EXPECT_EQ(trace.end.last_step(), 12);
  for (testing::Child& rank : ranks_) EXPECT_EQ(rank.Wait(), 0);
}

TEST_F(TraceTest, WhoseLastStepIsTheJobsLastIsWhole) {
  StartPaused(kPaused.With({{"steps", "12"}}));
  Tracing trace(jobs(), 6);
  ASSERT_TRUE(trace.Read());
  for (int rank = 0; rank < 2; ++rank) LetGo(kPaused, "backward_done", rank);
  ASSERT_TRUE(trace.ReadAll().ok());
  ExpectWhole(trace, 6);
  EXPECT_EQ(trace.end.last_step(), 12);
  for (testing::Child& rank : ranks_) EXPECT_EQ(rank.Wait(), 0);
}

TEST_F(TraceTest, TracesOfAClosedJobEndAtOnce) {
  StartPaused();
  Tracing trace(jobs(), 1000);
  ASSERT_TRUE(trace.Read());
  grpc::ClientContext context;
  v1::JobRef job;
  job.set_job("job");
  v1::CloseJobByNameResponse closed;
  ASSERT_TRUE(jobs().CloseJobByName(&context, job, &closed).ok());
  ASSERT_TRUE(trace.ReadAll().ok());
  EXPECT_EQ(trace.end.reason(), v1::TRACE_END_REASON_JOB_ENDED);
  EXPECT_THAT(trace.end.text(), HasSubstr("closed by uid"));
  EXPECT_GT(trace.end.first_step(), trace.end.last_step());
}

TEST_F(TraceTest, EndsWithItsDaemon) {
  StartPaused();
  Tracing trace(jobs(), 1000);
  ASSERT_TRUE(trace.Read());
  // A reader that reads: what a connection holds unread when its daemon's process ends may be lost.
  std::future<absl::Status> reading = std::async(std::launch::async, [&trace] { return trace.ReadAll(); });
  EXPECT_EQ(StopDaemon(), 0);
  const absl::Status ended = reading.get();
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_EQ(trace.end.reason(), v1::TRACE_END_REASON_JOB_ENDED);
  EXPECT_THAT(trace.end.text(), HasSubstr("shutting down"));
}

TEST_F(TraceTest, TracesWithoutStepsEndInTimeAndNameTheRank) {
  StartPaused(kPaused.With({{"steps", "12"}}));
  LetGo(kPaused, "backward_done", 0);
  const std::string file = File("trace.json");
  testing::Child shardctl =
      testing::Spawn({testing::ProgramPath("shardctl"), "trace", "-o", file, "--timeout", "0.5", "--address", socket()},
                     {.log = File("ctl.log")});
  EXPECT_EQ(shardctl.Wait(), 5);
  EXPECT_THAT(testing::ReadWholeFile(File("ctl.log")), HasSubstr("rank 0 waits for rank 1: Step"));
  EXPECT_THAT(testing::ReadWholeFile(File("ctl.log")), HasSubstr("0 whole steps"));
  EXPECT_TRUE(json::parse(testing::ReadWholeFile(file), nullptr, false).is_object());
  LetGo(kPaused, "backward_done", 1);
  for (testing::Child& rank : ranks_) EXPECT_EQ(rank.Wait(), 0);
}

}  // namespace
}  // namespace shardd::e2e
