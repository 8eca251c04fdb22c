#ifndef SHARDD_CLIENT_CTL_TRACE_CHROME_TRACE_H_
#define SHARDD_CLIENT_CTL_TRACE_CHROME_TRACE_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// A trace as the JSON that ui.perfetto.dev and chrome://tracing open (Trace Event Format).
//
//   process "job NAME"         thread "steps": a span per step; counter "memory" by purpose
//   process "rank R"           thread "trainer": its calls, and between them what it computes, by group
//                              threads "gradient slot S": "reduce GROUP", from submission to release
//                              tracks of the groups that are unsharded; counters of bytes unsharded and being reduced
//   process "device cpu:D"     a thread per stream: "reduce GROUP step N", "update step N", ...
//
// Spans of one thread follow each other. Times are microseconds since the trace's begin.
class ChromeTrace {
 public:
  // Some 200 bytes of memory each.
  static constexpr size_t kMaxSpans = 4'000'000;
  explicit ChromeTrace(size_t max_spans = kMaxSpans) : max_spans_(max_spans) {}

  // Messages in the order in which they came. Spans beyond the limit are counted as missing.
  void Add(const v1::TraceJobResponse& message);

  bool started() const { return started_; }
  bool ended() const { return ended_; }
  const v1::TraceStart& start() const { return start_; }
  const v1::TraceEnd& end() const { return end_; }
  size_t spans() const { return spans_.size(); }
  // Steps of which everything is there.
  int64_t whole_steps() const;
  // Spans of which is known that they are not there.
  int64_t missing() const { return end_.lost_spans() + end_.refused_records() + left_out_; }
  // Returns how many bytes were written; -1: it cannot be written, errno says why.
  int64_t Write(std::FILE* file) const;

 private:
  const size_t max_spans_;
  int64_t left_out_ = 0;
  bool started_ = false;
  bool ended_ = false;
  v1::TraceStart start_;
  v1::TraceEnd end_;
  std::vector<v1::TraceSpan> spans_;
};

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_TRACE_CHROME_TRACE_H_
