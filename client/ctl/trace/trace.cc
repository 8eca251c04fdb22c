#include "client/ctl/trace/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/call_secret.h"
#include "client/ctl/format.h"
#include "client/ctl/trace/chrome_trace.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

// For the last calls of the last step, and for what is under way in the stream.
constexpr absl::Duration kGrace = absl::Seconds(20);

absl::Status CannotWrite(const std::string& path) {
  return absl::InternalError(absl::StrCat("write trace \"", path, "\": ", std::strerror(errno)));
}

// Where the trace goes. A file is written beside its place and moved there when it is whole: what lies there is kept
// until there is something better.
class Output {
 public:
  explicit Output(const std::string& path) : path_(path) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (file_ != nullptr) {
      std::fclose(file_);
    }
    if (!part_.empty()) {
      ::unlink(part_.c_str());
    }
  }

  bool is_stdout() const { return path_ == "-"; }
  // A file lies there.
  bool existed() const { return existed_; }

  // Finds out whether it can be written.
  absl::Status Open() {
    if (is_stdout()) {
      return absl::OkStatus();
    }
    struct stat there;
    if (::stat(path_.c_str(), &there) == 0) {
      existed_ = S_ISREG(there.st_mode);  // a device or a pipe holds nothing that could be kept
      if (S_ISDIR(there.st_mode)) {
        errno = EISDIR;
        return CannotWrite(path_);
      }
      if (::access(path_.c_str(), W_OK) != 0) {
        return CannotWrite(path_);
      }
    }
    if (::lstat(path_.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
      return absl::OkStatus();  // written itself: a device or a link is not to be replaced
    }
    const std::string part = path_ + ".part";
    const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) {
      return CannotWrite(path_);
    }
    part_ = part;
    file_ = ::fdopen(fd, "w");
    return file_ == nullptr ? CannotWrite(path_) : absl::OkStatus();
  }

  // Returns how many bytes that took. REQUIRES: Open, once.
  absl::StatusOr<int64_t> Write(const ChromeTrace& trace) {
    if (file_ == nullptr && !is_stdout()) {
      file_ = std::fopen(path_.c_str(), "w");
      if (file_ == nullptr) {
        return CannotWrite(path_);
      }
    }
    const int64_t size_bytes = trace.Write(is_stdout() ? stdout : file_);
    if (size_bytes < 0 || (!part_.empty() && std::rename(part_.c_str(), path_.c_str()) != 0)) {
      return CannotWrite(path_);
    }
    part_.clear();
    return size_bytes;
  }

 private:
  const std::string path_;
  std::string part_;  // empty: there is none
  std::FILE* file_ = nullptr;
  bool existed_ = false;
};

}  // namespace

absl::StatusOr<std::string> TraceToFile(v1::JobsService::Stub& stub, const v1::JobRef& ref, const Options& options) {
  const std::string& job = ref.job();
  Output output(options.output);
  SHARDD_RETURN_IF_ERROR(output.Open());
  v1::TraceJobRequest request;
  request.set_job(job);
  if (ref.has_uid()) {
    request.set_uid(ref.uid());
  }
  request.set_steps(options.steps);
  request.set_timeout_ms(absl::ToInt64Milliseconds(options.timeout));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout + kGrace));
  AddJobSecret(options, &context);
  const auto reader = stub.TraceJob(&context, request);
  ChromeTrace trace;
  v1::TraceJobResponse message;
  while (reader->Read(&message)) {
    trace.Add(message);
  }
  const absl::Status ended = FromGrpcStatus(reader->Finish());
  if (!trace.started()) {
    return ended.ok() ? absl::InternalError(absl::StrCat("trace job \"", job, "\": the daemon sent nothing")) : ended;
  }
  const int64_t whole = trace.whole_steps();
  const bool keep = whole == 0 && output.existed();
  int64_t size_bytes = 0;
  if (!keep) {
    SHARDD_ASSIGN_OR_RETURN(size_bytes, output.Write(trace));
  }
  const std::string what = absl::StrCat(
      whole, whole == 1 ? " whole step" : " whole steps",
      whole > 0 ? absl::StrCat(" (", trace.end().first_step(), " to ", trace.end().last_step(), ")") : "", " of ",
      trace.start().world_size(), trace.start().world_size() == 1 ? " rank, " : " ranks, ", trace.spans(), " spans",
      keep ? absl::StrCat("; ", options.output, " is left as it was") : absl::StrCat(" in ", options.output));
  if (!ended.ok()) {
    return absl::Status(ended.code(), absl::StrCat("trace job \"", job, "\": ", ended.message(), "; ", what));
  }
  if (trace.end().reason() != v1::TRACE_END_REASON_STEPS) {
    const bool timeout = trace.end().reason() == v1::TRACE_END_REASON_TIMEOUT;
    return absl::Status(
        timeout ? absl::StatusCode::kOutOfRange : absl::StatusCode::kAborted,
        absl::StrCat("trace job \"", job, "\": ", timeout ? "" : "the job ended: ", trace.end().text(), "; ", what));
  }
  if (output.is_stdout()) {
    return std::string();
  }
  return absl::StrCat("wrote ", what, ", ", FormatMiB(size_bytes),
                      trace.missing() > 0 ? absl::StrCat("; ", trace.missing(), " spans are missing") : "",
                      "\nopen it at https://ui.perfetto.dev (it does not leave the browser) or chrome://tracing\n");
}

}  // namespace shardd::ctl
