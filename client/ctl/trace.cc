#include "client/ctl/trace.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/chrome_trace.h"
#include "client/ctl/format.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

// For the last calls of the last step, and for what is under way in the stream.
constexpr absl::Duration kGrace = absl::Seconds(20);

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

absl::Status CannotWrite(const std::string& path) {
  return absl::InternalError(absl::StrCat("write trace \"", path, "\": ", std::strerror(errno)));
}

absl::StatusOr<File> OpenOutput(const std::string& path) {
  if (path == "-") {
    return File(nullptr);
  }
  File file(std::fopen(path.c_str(), "a"));  // what lies there is kept until there is something better
  if (file == nullptr) {
    return CannotWrite(path);
  }
  return file;
}

absl::Status Write(File file, const std::string& path, const std::string& text) {
  if (path == "-") {
    return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0
               ? absl::OkStatus()
               : CannotWrite(path);
  }
  file.reset(std::fopen(path.c_str(), "w"));
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  return written && std::fflush(file.get()) == 0 ? absl::OkStatus() : CannotWrite(path);
}

}  // namespace

absl::StatusOr<std::string> TraceToFile(v1::JobsService::Stub& stub, const std::string& job, const Options& options) {
  const bool existed = ::access(options.output.c_str(), F_OK) == 0;
  SHARDD_ASSIGN_OR_RETURN(File file, OpenOutput(options.output));
  v1::TraceJobRequest request;
  request.set_job(job);
  request.set_steps(options.steps);
  request.set_timeout_ms(absl::ToInt64Milliseconds(options.timeout));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout + kGrace));
  const auto reader = stub.TraceJob(&context, request);
  ChromeTrace trace;
  v1::TraceJobResponse message;
  while (reader->Read(&message)) {
    trace.Add(message);
  }
  const absl::Status ended = FromGrpcStatus(reader->Finish());
  if (!trace.started()) {
    if (file != nullptr && !existed) {
      std::remove(options.output.c_str());
    }
    return ended.ok() ? absl::InternalError(absl::StrCat("trace job \"", job, "\": the daemon sent nothing")) : ended;
  }
  const std::string json = trace.Json();
  SHARDD_RETURN_IF_ERROR(Write(std::move(file), options.output, json));
  const int64_t whole = trace.whole_steps();
  const std::string what =
      absl::StrCat(whole, whole == 1 ? " whole step" : " whole steps",
                   whole > 0 ? absl::StrCat(" (", trace.end().first_step(), " to ", trace.end().last_step(), ")") : "",
                   " of ", trace.start().world_size(), trace.start().world_size() == 1 ? " rank, " : " ranks, ",
                   trace.spans(), " spans in ", options.output);
  if (!ended.ok()) {
    return absl::Status(ended.code(), absl::StrCat("trace job \"", job, "\": ", ended.message(), "; ", what));
  }
  if (trace.end().reason() != v1::TRACE_END_REASON_STEPS) {
    const bool timeout = trace.end().reason() == v1::TRACE_END_REASON_TIMEOUT;
    return absl::Status(
        timeout ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kAborted,
        absl::StrCat("trace job \"", job, "\": ", timeout ? "" : "the job ended: ", trace.end().text(), "; ", what));
  }
  if (options.output == "-") {
    return std::string();
  }
  const int64_t missing = trace.end().lost_spans() + trace.end().refused_records();
  return absl::StrCat("wrote ", what, ", ", FormatMiB(static_cast<int64_t>(json.size())),
                      missing > 0 ? absl::StrCat("; ", missing, " spans are missing") : "",
                      "\nopen it at https://ui.perfetto.dev (it does not leave the browser) or chrome://tracing\n");
}

}  // namespace shardd::ctl
