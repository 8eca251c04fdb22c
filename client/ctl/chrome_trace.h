#ifndef SHARDD_CLIENT_CTL_CHROME_TRACE_H_
#define SHARDD_CLIENT_CTL_CHROME_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// A trace as the JSON that ui.perfetto.dev and chrome://tracing open (Trace Event Format). Pure: no I/O.
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
  // Messages in the order in which they came.
  void Add(const v1::TraceJobResponse& message);

  bool started() const { return started_; }
  bool ended() const { return ended_; }
  const v1::TraceStart& start() const { return start_; }
  const v1::TraceEnd& end() const { return end_; }
  size_t spans() const { return spans_.size(); }
  // Steps of which everything is there.
  int64_t whole_steps() const;
  std::string Json() const;

 private:
  bool started_ = false;
  bool ended_ = false;
  v1::TraceStart start_;
  v1::TraceEnd end_;
  std::vector<v1::TraceSpan> spans_;
};

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_CHROME_TRACE_H_
