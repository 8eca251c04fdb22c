#include "client/ctl/trace/chrome_trace.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/ctl/trace/call_text.h"

namespace shardd::ctl {
namespace {

// Process and thread numbers of the file; people see the names.
constexpr int kJobPid = 1;
constexpr int kFirstRankPid = 100;
constexpr int kFirstDevicePid = 100000;
constexpr int kOnlyThread = 1;  // of the job: its steps; of a rank: its trainer
constexpr int kFirstSlotThread = 2;
// Ours, in the order in which a device prefers them.
constexpr const char* kStreams[] = {"unshard", "post_backward", "optimizer"};

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

// "12.345": exact, so that spans that touch do not overlap.
std::string Micros(int64_t ns) { return absl::StrFormat("%d.%03d", ns / 1000, ns % 1000); }

// Writes the events, each at once: the text is larger than what it is made of. Knows what the trace began with.
class Writer {
 public:
  // All outlive the writer.
  Writer(const v1::TraceStart& start, const v1::TraceEnd& end, const std::vector<v1::TraceSpan>& spans, std::FILE* file)
      : start_(start), end_(end), spans_(spans), file_(file) {
    for (const v1::TraceSpan& span : spans_) {
      last_ns_ = std::max(last_ns_, span.end_ns() - start_.begin_ns());
    }
  }

  void Text(absl::string_view text) { written_bytes_ += std::fwrite(text.data(), 1, text.size(), file_); }
  size_t written_bytes() const { return written_bytes_; }

  void Events() {
    Name(kJobPid, 0, absl::StrCat("job ", start_.job()));
    Name(kJobPid, kOnlyThread, "steps");
    AddMemory(start_.memory(), 0);
    AddMemory(end_.memory(), last_ns_);
    for (int rank = 0; rank < start_.world_size(); ++rank) {
      AddRank(rank);
    }
    for (const v1::TraceSpan& span : spans_) {
      if (span.kind() == v1::TRACE_KIND_STEP) {
        const bool whole = span.step() >= end_.first_step() && span.step() <= end_.last_step();
        Span(kJobPid, kOnlyThread, absl::StrCat("step ", span.step()), "step", span.begin_ns(), span.end_ns(),
             absl::StrCat("\"step\":", span.step(), ",\"whole\":", whole ? "true" : "false",
                          span.label().empty() ? "" : absl::StrCat(",\"waits\":", Quoted(span.label()))));
      } else if (span.kind() == v1::TRACE_KIND_WORK) {
        AddWork(span);
      }
    }
  }

 private:
  void Event(const std::string& event) {
    Text(first_event_ ? "" : ",\n");
    Text(event);
    first_event_ = false;
  }
  int64_t Since(int64_t ns) const { return ns - start_.begin_ns(); }
  std::string GroupName(int group) const {
    return group >= 0 && group < start_.groups_size() ? start_.groups(group).name() : "";
  }

  // thread 0: the process itself. Processes are listed in the order of their numbers.
  void Name(int pid, int tid, absl::string_view name) {
    if (!named_.insert({pid, tid}).second) {
      return;
    }
    if (tid == 0) {
      Event(absl::StrFormat(R"({"ph":"M","name":"process_sort_index","pid":%d,"args":{"sort_index":%d}})", pid, pid));
    } else {
      Event(absl::StrFormat(R"({"ph":"M","name":"thread_sort_index","pid":%d,"tid":%d,"args":{"sort_index":%d}})", pid,
                            tid, tid));
    }
    Event(absl::StrFormat(R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})",
                          tid == 0 ? "process_name" : "thread_name", pid, tid, Quoted(name)));
  }
  void Span(int pid, int tid, absl::string_view name, const char* category, int64_t begin_ns, int64_t end_ns,
            const std::string& args) {
    Event(absl::StrFormat(R"({"ph":"X","name":%s,"cat":"%s","pid":%d,"tid":%d,"ts":%s,"dur":%s,"args":{%s}})",
                          Quoted(name), category, pid, tid, Micros(Since(begin_ns)), Micros(end_ns - begin_ns), args));
  }
  void Counter(int pid, const char* name, const char* key, std::vector<std::pair<int64_t, int64_t>> changes) {
    std::sort(changes.begin(), changes.end());
    int64_t value = 0;
    for (size_t i = 0; i < changes.size(); ++i) {
      value += changes[i].second;
      if (i + 1 < changes.size() && changes[i + 1].first == changes[i].first) {
        continue;  // one value for each moment
      }
      Event(absl::StrFormat(R"({"ph":"C","name":"%s","pid":%d,"ts":%s,"args":{"%s":%d}})", name, pid,
                            Micros(Since(changes[i].first)), key, value));
    }
  }
  void AddMemory(const v1::Memory& memory, int64_t at_ns) {
    if (memory.purposes().empty()) {
      return;
    }
    const std::string values = absl::StrJoin(memory.purposes(), ",", [](std::string* out, const v1::Purpose& purpose) {
      absl::StrAppend(out, Quoted(purpose.purpose()), ":", purpose.allocated_bytes());
    });
    Event(
        absl::StrFormat(R"({"ph":"C","name":"memory","pid":%d,"ts":%s,"args":{%s}})", kJobPid, Micros(at_ns), values));
  }

  void AddRank(int rank) {
    const int pid = kFirstRankPid + rank;
    Name(pid, 0,
         absl::StrCat("rank ", rank, rank < start_.pids_size() ? absl::StrCat(", pid ", start_.pids(rank)) : ""));
    Name(pid, kOnlyThread, "trainer");
    AddCalls(rank, pid);
    std::vector<std::pair<int64_t, int64_t>> bytes;
    for (const v1::TraceSpan& span : spans_) {
      if (span.kind() != v1::TRACE_KIND_REDUCE || span.rank() != rank) {
        continue;
      }
      const int tid = kFirstSlotThread + span.slot();
      Name(pid, tid, absl::StrCat("gradient slot ", span.slot()));
      Span(pid, tid, absl::StrCat("reduce ", GroupName(span.group())), "reduce", span.begin_ns(), span.end_ns(),
           Args(span));
      if (span.group() >= 0 && span.group() < start_.groups_size()) {
        bytes.emplace_back(span.begin_ns(), start_.groups(span.group()).gradient_bytes());
        bytes.emplace_back(span.end_ns(), -start_.groups(span.group()).gradient_bytes());
      }
    }
    Counter(pid, "gradients being reduced", "bytes", std::move(bytes));
  }

  std::string Args(const v1::TraceSpan& span, absl::string_view more = "") const {
    std::string args = absl::StrCat("\"step\":", span.step());
    if (span.group() >= 0) {
      absl::StrAppend(&args, ",\"group\":", Quoted(GroupName(span.group())));
    }
    return absl::StrCat(args, more);
  }

  // What a rank holds unsharded, as its calls tell.
  struct Held {
    int users = 0;  // Unshard less Reshard
    int64_t since_ns = 0;
    bool called = false;  // since the last BackwardDone: what is merely kept unsharded is not computed with
  };
  void AddCalls(int rank, int pid) {
    std::map<int, Held> held;
    std::vector<int> innermost;  // groups that can be read, in the order in which they came to be
    std::vector<std::pair<int64_t, int64_t>> bytes;
    const auto let_go = [&](int group, int64_t at_ns) {
      const auto it = std::find(innermost.begin(), innermost.end(), group);
      if (it == innermost.end()) {
        return;
      }
      innermost.erase(it);
      Residency(pid, group, held[group].since_ns, at_ns);
      bytes.emplace_back(held[group].since_ns, start_.groups(group).unsharded_bytes());
      bytes.emplace_back(at_ns, -start_.groups(group).unsharded_bytes());
    };
    const auto let_all_go = [&](int64_t at_ns) {
      while (!innermost.empty()) {
        let_go(innermost.back(), at_ns);
      }
      held.clear();
    };
    bool in_backward = false;
    const v1::TraceSpan* last = nullptr;
    for (const v1::TraceSpan& span : spans_) {
      if (span.kind() != v1::TRACE_KIND_CALL || span.rank() != rank) {
        continue;
      }
      if (last != nullptr && (span.epoch() != last->epoch() || span.lost() > 0)) {
        let_all_go(last->end_ns());  // another session, or nobody knows
        in_backward = in_backward && span.epoch() == last->epoch();
      } else if (last != nullptr && span.begin_ns() > last->end_ns()) {
        const bool known = !innermost.empty() && held[innermost.back()].called;
        Compute(pid, *last, span, known ? innermost.back() : -1, in_backward);
      }
      const CallText text = TextOf(span.call());
      const bool forward = span.call() == v1::TRACE_CALL_UNSHARD_FORWARD;
      const bool unshards = forward || span.call() == v1::TRACE_CALL_UNSHARD_BACKWARD;
      Span(pid, kOnlyThread, span.group() >= 0 ? absl::StrCat(text.name, " ", GroupName(span.group())) : text.name,
           text.category, span.begin_ns(), span.end_ns(),
           Args(span, absl::StrCat(!unshards ? ""
                                   : forward ? R"(,"phase":"forward")"
                                             : R"(,"phase":"backward")",
                                   span.failed() ? R"(,"failed":true)" : "")));
      last = &span;
      if (span.failed()) {
        continue;
      }
      switch (span.call()) {
        case v1::TRACE_CALL_UNSHARD_BACKWARD:
        case v1::TRACE_CALL_WAIT_GRADIENT_SLOT:
        case v1::TRACE_CALL_SUBMIT_GRADIENTS:
          in_backward = true;
          break;
        case v1::TRACE_CALL_ABANDON_BACKWARD:
          let_all_go(span.end_ns());
          in_backward = false;
          break;
        case v1::TRACE_CALL_BACKWARD_DONE:
          in_backward = false;
          for (auto& [group, state] : held) {
            state.called = false;
          }
          break;
        default:
          break;
      }
      if (span.group() < 0 || span.group() >= start_.groups_size()) {
        continue;
      }
      Held& group = held[span.group()];
      group.called = true;
      if (unshards) {
        ++group.users;
      } else if (span.call() == v1::TRACE_CALL_WAIT_UNSHARD && group.users > 0 &&
                 std::find(innermost.begin(), innermost.end(), span.group()) == innermost.end()) {
        group.since_ns = span.end_ns();
        innermost.push_back(span.group());
      } else if (span.call() == v1::TRACE_CALL_RESHARD && group.users > 0 && --group.users == 0) {
        let_go(span.group(), span.end_ns());
      }
    }
    if (last != nullptr) {
      let_all_go(last->end_ns());
    }
    Counter(pid, "unsharded", "bytes", std::move(bytes));
  }

  // Between two calls the trainer computes with what it has unsharded last, or does something of its own.
  void Compute(int pid, const v1::TraceSpan& before, const v1::TraceSpan& after, int group, bool backward) {
    std::string args = absl::StrCat("\"step\":", after.step());
    if (group >= 0) {
      absl::StrAppend(&args, ",\"group\":", Quoted(GroupName(group)),
                      backward ? R"(,"phase":"backward")" : R"(,"phase":"forward")");
    }
    Span(pid, kOnlyThread, group >= 0 ? absl::StrCat("compute ", GroupName(group)) : "trainer's own",
         group >= 0 ? "compute" : "own", before.end_ns(), after.begin_ns(), args);
  }

  // Groups overlap as they like, so each is a track of its own.
  void Residency(int pid, int group, int64_t begin_ns, int64_t end_ns) {
    const int id = next_id_++;
    for (const auto& [phase, at_ns] : {std::pair{"b", begin_ns}, {"e", end_ns}}) {
      Event(absl::StrFormat(R"({"ph":"%s","cat":"unsharded","id":%d,"name":%s,"pid":%d,"tid":%d,"ts":%s})", phase, id,
                            Quoted(absl::StrCat("unsharded ", GroupName(group))), pid, kOnlyThread,
                            Micros(Since(at_ns))));
    }
  }

  void AddWork(const v1::TraceSpan& span) {
    const auto [it, added] = devices_.try_emplace(span.device(), kFirstDevicePid + static_cast<int>(devices_.size()));
    const int pid = it->second;
    Name(pid, 0, absl::StrCat("device ", span.device()));
    const auto* stream = std::find(std::begin(kStreams), std::end(kStreams), span.stream());
    const int tid = 1 + static_cast<int>(stream - std::begin(kStreams));
    Name(pid, tid, span.stream());
    Span(pid, tid, span.label(), "work", span.begin_ns(), span.end_ns(), absl::StrCat("\"rank\":", span.rank()));
  }

  const v1::TraceStart& start_;
  const v1::TraceEnd& end_;
  const std::vector<v1::TraceSpan>& spans_;
  int64_t last_ns_ = 0;
  std::FILE* const file_;
  size_t written_bytes_ = 0;
  bool first_event_ = true;
  std::set<std::pair<int, int>> named_;
  std::map<std::string, int> devices_;
  int next_id_ = 1;
};

}  // namespace

void ChromeTrace::Add(const v1::TraceJobResponse& message) {
  switch (message.part_case()) {
    case v1::TraceJobResponse::kStart:
      start_ = message.start();
      started_ = true;
      break;
    case v1::TraceJobResponse::kSpans: {
      const auto& more = message.spans().spans();
      const auto room = std::min<ptrdiff_t>(more.size(), static_cast<ptrdiff_t>(max_spans_ - spans_.size()));
      spans_.insert(spans_.end(), more.begin(), more.begin() + room);
      left_out_ += more.size() - room;
      break;
    }
    case v1::TraceJobResponse::kEnd:
      end_ = message.end();
      ended_ = true;
      break;
    case v1::TraceJobResponse::PART_NOT_SET:
      break;
  }
}

int64_t ChromeTrace::whole_steps() const {
  return ended_ ? std::max<int64_t>(0, end_.last_step() - end_.first_step() + 1) : 0;
}

int64_t ChromeTrace::Write(std::FILE* file) const {
  Writer writer(start_, end_, spans_, file);
  writer.Text(absl::StrCat("{\"displayTimeUnit\":\"ns\",\n\"otherData\":{\"job\":", Quoted(start_.job()),
                           ",\"world_size\":", start_.world_size(), ",\"shardd\":", Quoted(start_.version()),
                           ",\"begin_unix_us\":", start_.begin_unix_us(), ",\"first_whole_step\":", end_.first_step(),
                           ",\"last_whole_step\":", end_.last_step(), ",\"ended\":", Quoted(end_.text()),
                           ",\"lost_spans\":", end_.lost_spans() + left_out_,
                           ",\"refused_records\":", end_.refused_records(), "},\n\"traceEvents\":[\n"));
  writer.Events();
  writer.Text("\n]}\n");
  return std::fflush(file) == 0 && std::ferror(file) == 0 ? static_cast<int64_t>(writer.written_bytes()) : -1;
}

}  // namespace shardd::ctl
