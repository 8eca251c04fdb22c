#include "client/ctl/trace/chrome_trace.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace shardd::ctl {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kBegin = 1'000'000'000;

class ChromeTraceTest : public ::testing::Test {
 protected:
  ChromeTraceTest() {
    v1::TraceJobResponse message;
    v1::TraceStart& start = *message.mutable_start();
    start.set_job("job");
    start.set_world_size(1);
    start.set_begin_ns(kBegin);
    for (const char* name : {"(root)", "inner", "odd \"\\\n"}) {
      v1::TraceStart::Group& group = *start.add_groups();
      group.set_name(name);
      group.set_unsharded_bytes(100);
      group.set_gradient_bytes(10);
    }
    trace_.Add(message);
  }
  v1::TraceSpan& Add(v1::TraceKind kind, int group, int64_t begin, int64_t end) {
    v1::TraceSpan& span = *pending_.mutable_spans()->add_spans();
    span.set_kind(kind);
    span.set_group(group);
    span.set_step(7);
    span.set_begin_ns(kBegin + begin);
    span.set_end_ns(kBegin + end);
    span.set_epoch(1);
    return span;
  }
  v1::TraceSpan& Call(v1::TraceCall call, int group, int64_t begin, int64_t end) {
    v1::TraceSpan& span = Add(v1::TRACE_KIND_CALL, group, begin, end);
    span.set_call(call);
    return span;
  }
  // A group that is read from `begin` to `end`.
  void Unshard(int group, int64_t begin) {
    Call(v1::TRACE_CALL_UNSHARD_FORWARD, group, begin, begin + 10);
    Call(v1::TRACE_CALL_WAIT_UNSHARD, group, begin + 10, begin + 20);
  }
  void Reshard(int group, int64_t begin) { Call(v1::TRACE_CALL_RESHARD, group, begin, begin + 10); }

  static std::string Written(const ChromeTrace& trace) {
    char* text = nullptr;
    size_t length = 0;
    std::FILE* file = ::open_memstream(&text, &length);
    const int64_t size_bytes = trace.Write(file);
    std::fclose(file);
    EXPECT_EQ(size_bytes, static_cast<int64_t>(length));
    std::string written(text, length);
    std::free(text);
    return written;
  }
  json Parsed() {
    trace_.Add(pending_);
    const std::string written = Written(trace_);
    json result = json::parse(written, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(result.is_object()) << written;
    return result["traceEvents"];
  }
  // "compute inner backward", ... of what a rank computed, in order; the phase where there is one.
  static std::vector<std::string> Phases(const json& events) {
    std::vector<std::string> found;
    for (const json& event : events) {
      const std::string name = event["name"];
      if (event["ph"] == "X" && (name.rfind("compute", 0) == 0 || name == "trainer's own")) {
        found.push_back(name +
                        (event["args"].contains("phase") ? " " + event["args"]["phase"].get<std::string>() : ""));
      }
    }
    return found;
  }
  // "compute inner 20+80" of all spans whose name begins with `prefix`, in nanoseconds.
  static std::vector<std::string> Spans(const json& events, const std::string& prefix) {
    std::vector<std::string> found;
    for (const json& event : events) {
      if (event["ph"] != "X" || event["name"].get<std::string>().rfind(prefix, 0) != 0) continue;
      found.push_back(event["name"].get<std::string>() + " " +
                      std::to_string(std::lround(event["ts"].get<double>() * 1000)) + "+" +
                      std::to_string(std::lround(event["dur"].get<double>() * 1000)));
    }
    return found;
  }
  // The values of a counter, in their order.
  static std::vector<int64_t> Counter(const json& events, const std::string& name) {
    std::vector<int64_t> values;
    for (const json& event : events) {
      if (event["ph"] == "C" && event["name"] == name) values.push_back(event["args"]["bytes"].get<int64_t>());
    }
    return values;
  }

  ChromeTrace trace_;
  v1::TraceJobResponse pending_;
};

TEST_F(ChromeTraceTest, BetweenCallsTheTrainerComputesWithTheLastUnshardedGroup) {
  Unshard(0, 0);
  Unshard(1, 100);
  Reshard(1, 300);
  Reshard(0, 400);
  Call(v1::TRACE_CALL_STEP, -1, 500, 510);
  const json events = Parsed();
  EXPECT_THAT(Spans(events, "compute"),
              ElementsAre("compute (root) 20+80", "compute inner 120+180", "compute (root) 310+90"));
  EXPECT_THAT(Spans(events, "trainer's own"), ElementsAre("trainer's own 410+90"));
  EXPECT_THAT(Spans(events, "step"), ElementsAre("step 500+10"));
  EXPECT_THAT(Counter(events, "unsharded"), ElementsAre(100, 200, 100, 0));
}

TEST_F(ChromeTraceTest, AGroupUnshardedTwiceIsHeldUntilReshardedTwice) {
  Unshard(1, 0);
  Unshard(1, 100);
  Reshard(1, 200);
  Reshard(1, 300);
  const json events = Parsed();
  EXPECT_THAT(Spans(events, "compute"),
              ElementsAre("compute inner 20+80", "compute inner 120+80", "compute inner 210+90"));
  EXPECT_THAT(Counter(events, "unsharded"), ElementsAre(100, 0));
}

TEST_F(ChromeTraceTest, WhereCallsAreMissingNothingIsMadeUp) {
  Unshard(1, 0);
  Call(v1::TRACE_CALL_WAIT_UNSHARD, 1, 100, 110);
  Call(v1::TRACE_CALL_STEP, -1, 500, 510).set_lost(3);
  Call(v1::TRACE_CALL_WAIT_STEP, -1, 600, 610);
  const json events = Parsed();
  EXPECT_THAT(Spans(events, "compute"), ElementsAre("compute inner 20+80"));
  EXPECT_THAT(Spans(events, "trainer's own"), ElementsAre("trainer's own 510+90"));
  EXPECT_THAT(Counter(events, "unsharded"), ElementsAre(100, 0));
}

TEST_F(ChromeTraceTest, AnotherSessionBeginsWithNothingUnsharded) {
  Unshard(1, 0);
  Call(v1::TRACE_CALL_UNSHARD_FORWARD, 0, 500, 510).set_epoch(2);
  Call(v1::TRACE_CALL_BACKWARD_DONE, -1, 600, 610).set_epoch(2);
  EXPECT_THAT(Spans(Parsed(), "compute"), IsEmpty());
}

TEST_F(ChromeTraceTest, AnAbandonedBackwardLeavesNothingUnsharded) {
  Unshard(0, 0);
  Unshard(1, 100);
  Call(v1::TRACE_CALL_ABANDON_BACKWARD, -1, 200, 210);
  Call(v1::TRACE_CALL_STEP, -1, 300, 310);
  const json events = Parsed();
  EXPECT_THAT(Spans(events, "trainer's own"), ElementsAre("trainer's own 210+90"));
  EXPECT_THAT(Counter(events, "unsharded"), ElementsAre(100, 200, 0));
}

TEST_F(ChromeTraceTest, BackwardComputesWithAGroupThatWasKeptUnsharded) {
  Unshard(0, 0);  // and until the end of the backward
  Unshard(1, 100);
  Reshard(1, 200);
  Call(v1::TRACE_CALL_UNSHARD_BACKWARD, 1, 300, 310);
  Call(v1::TRACE_CALL_WAIT_UNSHARD, 1, 310, 320);
  Call(v1::TRACE_CALL_WAIT_GRADIENT_SLOT, 1, 400, 410);
  Call(v1::TRACE_CALL_SUBMIT_GRADIENTS, 1, 420, 430);
  Reshard(1, 430);
  Call(v1::TRACE_CALL_WAIT_GRADIENT_SLOT, 0, 500, 510);
  Call(v1::TRACE_CALL_BACKWARD_DONE, -1, 600, 610);
  Unshard(1, 700);
  Reshard(1, 800);
  EXPECT_THAT(Phases(Parsed()),
              ElementsAre("compute (root) forward", "compute inner forward", "compute (root) forward",
                          "compute inner backward", "compute inner backward", "compute (root) backward",
                          "compute (root) backward", "trainer's own", "compute inner forward"));
}

TEST_F(ChromeTraceTest, AnAbandonedBackwardIsFollowedByForward) {
  Unshard(1, 0);
  Call(v1::TRACE_CALL_WAIT_GRADIENT_SLOT, 1, 100, 110);
  Call(v1::TRACE_CALL_ABANDON_BACKWARD, -1, 200, 210);
  Unshard(1, 210);
  Reshard(1, 300);
  EXPECT_THAT(Phases(Parsed()),
              ElementsAre("compute inner forward", "compute inner backward", "compute inner forward"));
}

TEST_F(ChromeTraceTest, ACallThatFailedIsDrawnAndChangesNothing) {
  Unshard(1, 0);
  Call(v1::TRACE_CALL_UNSHARD_FORWARD, 1, 20, 30).set_failed(true);
  Call(v1::TRACE_CALL_ABANDON_BACKWARD, -1, 40, 50).set_failed(true);
  Call(v1::TRACE_CALL_SUBMIT_GRADIENTS, 1, 60, 70).set_failed(true);
  Reshard(1, 100);
  Call(v1::TRACE_CALL_STEP, -1, 200, 210);
  const json events = Parsed();
  EXPECT_THAT(Counter(events, "unsharded"), ElementsAre(100, 0));
  EXPECT_THAT(Phases(events),
              ElementsAre("compute inner forward", "compute inner forward", "compute inner forward", "trainer's own"));
  EXPECT_THAT(Spans(events, "unshard"), ElementsAre("unshard inner 0+10", "unshard inner 20+10"));
  int failed = 0;
  for (const json& event : events) {
    failed += event["ph"] == "X" && event["args"].value("failed", false) ? 1 : 0;
  }
  EXPECT_EQ(failed, 3);
}

TEST_F(ChromeTraceTest, SpansBeyondTheLimitAreCountedAsMissing) {
  ChromeTrace small(2);
  for (int i = 0; i < 5; ++i) {
    Call(v1::TRACE_CALL_STEP, -1, 10 * i, 10 * i + 1);
  }
  small.Add(pending_);
  v1::TraceJobResponse end;
  end.mutable_end()->set_lost_spans(10);
  end.mutable_end()->set_refused_records(100);
  small.Add(end);
  EXPECT_EQ(small.spans(), 2u);
  EXPECT_EQ(small.missing(), 113);
  EXPECT_EQ(json::parse(Written(small))["otherData"]["lost_spans"], 13);
}

TEST_F(ChromeTraceTest, WhatCannotBeWrittenSaysSo) {
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  EXPECT_EQ(trace_.Write(full), -1);
  std::fclose(full);
}

TEST_F(ChromeTraceTest, ReductionsOfASlotAreAThreadAndACounter) {
  Add(v1::TRACE_KIND_REDUCE, 1, 100, 200).set_slot(0);
  Add(v1::TRACE_KIND_REDUCE, 0, 150, 250).set_slot(1);
  const json events = Parsed();
  EXPECT_THAT(Spans(events, "reduce"), ElementsAre("reduce inner 100+100", "reduce (root) 150+100"));
  EXPECT_THAT(Counter(events, "gradients being reduced"), ElementsAre(10, 20, 10, 0));
  std::vector<int> threads;
  for (const json& event : events) {
    if (event["ph"] == "X") threads.push_back(event["tid"].get<int>());
  }
  EXPECT_NE(threads[0], threads[1]);
}

TEST_F(ChromeTraceTest, NamesAreQuotedAndTimesAreExact) {
  Call(v1::TRACE_CALL_RESHARD, 2, 1, 1'234'567'891);
  EXPECT_THAT(Spans(Parsed(), "reshard"), ElementsAre("reshard odd \"\\\n 1+1234567890"));
}

TEST_F(ChromeTraceTest, AStepSaysForWhomTheOthersWaited) {
  Add(v1::TRACE_KIND_STEP, -1, 100, 200).set_label("others waited for rank 1, together 30ms");
  Add(v1::TRACE_KIND_STEP, -1, 200, 300);
  const json events = Parsed();
  std::vector<std::string> waits;
  for (const json& event : events) {
    if (event.value("cat", "") == "step") waits.push_back(event["args"].value("waits", ""));
  }
  EXPECT_THAT(waits, ElementsAre("others waited for rank 1, together 30ms", ""));
}

TEST_F(ChromeTraceTest, GroupsThatTheStartDoesNotHaveDoNoHarm) {
  Unshard(9, 0);
  Add(v1::TRACE_KIND_REDUCE, 9, 100, 200);
  Reshard(9, 300);
  EXPECT_THAT(Spans(Parsed(), "compute"), IsEmpty());
}

TEST_F(ChromeTraceTest, WholeStepsAreThoseThatTheEndNames) {
  EXPECT_EQ(trace_.whole_steps(), 0);
  v1::TraceJobResponse message;
  message.mutable_end()->set_first_step(5);
  message.mutable_end()->set_last_step(4);
  trace_.Add(message);
  EXPECT_EQ(trace_.whole_steps(), 0);
  message.mutable_end()->set_last_step(7);
  trace_.Add(message);
  EXPECT_EQ(trace_.whole_steps(), 3);
}

}  // namespace
}  // namespace shardd::ctl
