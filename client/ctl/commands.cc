#include "client/ctl/commands.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/address.h"
#include "client/ctl/call_secret.h"
#include "client/ctl/format.h"
#include "client/ctl/handover.h"
#include "client/ctl/history_views.h"
#include "client/ctl/offline.h"
#include "client/ctl/top.h"
#include "client/ctl/trace/trace.h"
#include "client/ctl/views.h"
#include "common/process/environment.h"
#include "common/secret/job_secret.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd::ctl {
namespace {

constexpr int kMaxMessageBytes = 256 << 20;
constexpr char kClearScreen[] = "\x1b[H\x1b[2J";
constexpr int kLinesAboveRanks = 13;  // of `top JOB`, with two below

// What fits below the lines that stand above ranks; 0: standard output is no terminal, and all do.
int RowsForRanks() {
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_row == 0) return 0;
  return std::max(1, window.ws_row - kLinesAboveRanks);
}

// One command's work: calls, and prints either way.
class Executor {
 public:
  Executor(const std::shared_ptr<grpc::Channel>& channel, std::string address, const Options& options, bool color,
           v1::GetMetricsResponse* past)
      : stub_(v1::JobsService::NewStub(channel)), address_(std::move(address)), options_(options), past_(past) {
    view_.color = color;
    view_.now = absl::Now();
    view_.handles = options.handles;
  }

  absl::StatusOr<std::string> Execute() {
    using Stub = v1::JobsService::Stub;
    switch (options_.command) {
      case Command::kStatus: {
        SHARDD_ASSIGN_OR_RETURN(const v1::Daemon daemon, Call<v1::Daemon>(&Stub::GetDaemon, v1::GetDaemonRequest()));
        return options_.json ? Json(daemon) : Show(daemon, address_, view_);
      }
      case Command::kJobs:
        return ShowJobs();
      case Command::kStreams:
        return Answer<v1::ListStreamsResponse>(&Stub::ListStreams, v1::ListStreamsRequest());
      case Command::kEvents: {
        v1::ListEventsRequest request;
        request.set_job(options_.job);
        request.set_limit(options_.limit);
        if (options_.uid.has_value()) {
          request.set_uid(*options_.uid);
        }
        return Answer<v1::ListEventsResponse>(&Stub::ListEvents, request);
      }
      case Command::kHistory:
        return Answer<v1::ListHistoryResponse>(&Stub::ListHistory, HistoryRequest());
      case Command::kWhy: {
        v1::ListHistoryRequest request = HistoryRequest();
        request.set_events_only(true);
        SHARDD_ASSIGN_OR_RETURN(const v1::ListHistoryResponse history,
                                Call<v1::ListHistoryResponse>(&Stub::ListHistory, request));
        return options_.json ? Json(history) : ShowWhy(options_.job, history);
      }
      case Command::kJob:
        return ShowJob();
      case Command::kTop:
        return Top();
      case Command::kRanks:
        return AnswerOfJob<v1::ListRanksResponse>("list ranks of", &Stub::ListRanks);
      case Command::kGroups:
        return AnswerOfJob<v1::ListGroupsResponse>("list groups of", &Stub::ListGroups);
      case Command::kParams:
        return AnswerOfJob<v1::ListParametersResponse>("list parameters of", &Stub::ListParameters);
      case Command::kMemory:
        return AnswerOfJob<v1::Memory>("show memory of", &Stub::GetMemory);
      case Command::kClose:
        return Close();
      case Command::kTrace:
        return Trace();
      case Command::kHandover:
        return HandOver(address_, options_);
      case Command::kHelp:
      case Command::kPlan:
      case Command::kPredict:
      case Command::kVersion:
        break;
    }
    return absl::InternalError("execute: the command asks no daemon");
  }

 private:
  template <typename Response, typename Request>
  using Method = grpc::Status (v1::JobsService::Stub::*)(grpc::ClientContext*, const Request&, Response*);

  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(Method<Response, Request> method, const Request& request) {
    grpc::ClientContext context;
    AddJobSecret(options_, &context);
    context.set_deadline(absl::ToChronoTime(absl::Now() + options_.timeout));
    Response response;
    const absl::Status status = FromGrpcStatus((stub_.get()->*method)(&context, request, &response));
    switch (status.code()) {
      case absl::StatusCode::kOk:
        return response;
      case absl::StatusCode::kDeadlineExceeded:
        return absl::DeadlineExceededError(absl::StrCat("ask daemon \"", address_, "\": no answer within ",
                                                        absl::FormatDuration(options_.timeout),
                                                        "; see what its process does, or give a longer --timeout"));
      case absl::StatusCode::kUnavailable:
        return absl::UnavailableError(
            absl::StrCat("ask daemon \"", address_, "\": it is gone (", status.message(), "); see its log"));
      default:
        return status;
    }
  }

  v1::ListHistoryRequest HistoryRequest() const {
    v1::ListHistoryRequest request;
    request.set_job(options_.job);
    request.set_limit(options_.limit);
    if (options_.uid.has_value()) request.set_uid(*options_.uid);
    if (options_.since > absl::ZeroDuration()) {
      request.set_since_unix_ms(absl::ToUnixMillis(absl::Now() - options_.since));
    }
    return request;
  }

  absl::StatusOr<std::string> Json(const google::protobuf::Message& message) const {
    return ToJson(message, options_.watch > absl::ZeroDuration());
  }

  template <typename Response, typename Request>
  absl::StatusOr<std::string> Answer(Method<Response, Request> method, const Request& request) {
    SHARDD_ASSIGN_OR_RETURN(const Response response, Call<Response>(method, request));
    return options_.json ? Json(response) : Show(response, view_);
  }

  template <typename Response>
  absl::StatusOr<std::string> AnswerOfJob(const char* operation, Method<Response, v1::JobRef> method) {
    SHARDD_ASSIGN_OR_RETURN(const v1::JobRef request, Ref());
    absl::StatusOr<std::string> answer = Answer<Response>(method, request);
    return absl::IsNotFound(answer.status()) ? NoSuchJob(operation, request.job()) : std::move(answer);
  }

  static absl::Status NoSuchJob(const char* operation, const std::string& name) {
    return absl::NotFoundError(
        absl::StrCat(operation, " job \"", name, "\": no such job; `shardctl jobs` lists those that are there"));
  }

  // Of the user that was named, if any.
  absl::StatusOr<v1::ListJobsResponse> ListJobs() {
    SHARDD_ASSIGN_OR_RETURN(v1::ListJobsResponse jobs,
                            Call<v1::ListJobsResponse>(&v1::JobsService::Stub::ListJobs, v1::ListJobsRequest()));
    auto* const list = jobs.mutable_jobs();
    list->erase(std::remove_if(list->begin(), list->end(),
                               [&](const v1::Job& job) { return options_.uid.value_or(job.uid()) != job.uid(); }),
                list->end());
    return jobs;
  }

  absl::StatusOr<std::string> ShowJobs() {
    SHARDD_ASSIGN_OR_RETURN(const v1::ListJobsResponse jobs, ListJobs());
    return options_.json ? Json(jobs) : Show(jobs, view_);
  }

  absl::StatusOr<v1::JobRef> Ref() {
    v1::JobRef ref;
    SHARDD_ASSIGN_OR_RETURN(*ref.mutable_job(), JobName());
    if (options_.uid.has_value()) {
      ref.set_uid(*options_.uid);
    }
    return ref;
  }

  // The one that was named, or the only one.
  absl::StatusOr<std::string> JobName() {
    if (!options_.job.empty()) {
      return options_.job;
    }
    SHARDD_ASSIGN_OR_RETURN(const v1::ListJobsResponse jobs, ListJobs());
    if (jobs.jobs().empty()) {
      return absl::NotFoundError("choose job: there is none; the first trainer that attaches makes one");
    }
    if (jobs.jobs_size() > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("choose job: there are several (",
                       absl::StrJoin(jobs.jobs(), ", ",
                                     [](std::string* out, const v1::Job& job) { absl::StrAppend(out, job.name()); }),
                       "); name one"));
    }
    return jobs.jobs(0).name();
  }

  // The one of that name, of the user that was named, if any. Null: there is none. INVALID_ARGUMENT: there are several.
  template <typename Jobs>
  absl::StatusOr<const typename Jobs::value_type*> Find(const Jobs& jobs, const std::string& name) const {
    const typename Jobs::value_type* found = nullptr;
    for (const auto& job : jobs) {
      if (job.name() != name || options_.uid.value_or(job.uid()) != job.uid()) {
        continue;
      }
      if (found != nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("show job \"", name,
                                                       "\": several users have one of that name (uid ", found->uid(),
                                                       ", uid ", job.uid(), "); choose with --uid"));
      }
      found = &job;
    }
    return found;
  }

  absl::StatusOr<std::string> ShowJob() {
    SHARDD_ASSIGN_OR_RETURN(const std::string name, JobName());
    SHARDD_ASSIGN_OR_RETURN(const v1::ListJobsResponse jobs, ListJobs());
    SHARDD_ASSIGN_OR_RETURN(const v1::Job* const found, Find(jobs.jobs(), name));
    return found == nullptr ? NoSuchJob("show", name)
           : options_.json  ? Json(*found)
                            : absl::StatusOr<std::string>(Show(*found, view_));
  }

  absl::StatusOr<std::string> Top() {
    using Stub = v1::JobsService::Stub;
    TopAnswers answers;
    SHARDD_ASSIGN_OR_RETURN(answers.now, Call<v1::GetMetricsResponse>(&Stub::GetMetrics, v1::GetMetricsRequest()));
    const bool has_past = past_ != nullptr && past_->has_daemon();
    answers.before = has_past ? past_ : nullptr;
    std::string text;
    if (options_.job.empty()) {
      auto* const jobs = answers.now.mutable_jobs();
      jobs->erase(
          std::remove_if(jobs->begin(), jobs->end(),
                         [&](const v1::JobMetrics& job) { return options_.uid.value_or(job.uid()) != job.uid(); }),
          jobs->end());
      text = options_.json ? TopJson(answers, nullptr, nullptr) : ShowTop(answers, view_);
    } else {
      SHARDD_ASSIGN_OR_RETURN(const v1::JobMetrics* const job, Find(answers.now.jobs(), options_.job));
      if (job == nullptr) return NoSuchJob("show", options_.job);
      v1::JobRef ref;
      ref.set_job(job->name());
      ref.set_uid(job->uid());
      SHARDD_ASSIGN_OR_RETURN(const v1::ListRanksResponse ranks, Call<v1::ListRanksResponse>(&Stub::ListRanks, ref));
      const int rows = options_.watch > absl::ZeroDuration() ? RowsForRanks() : 0;
      text = options_.json ? TopJson(answers, job, &ranks) : ShowTop(answers, *job, ranks, rows, view_);
    }
    if (past_ != nullptr) *past_ = std::move(answers.now);
    return text;
  }

  absl::StatusOr<std::string> Close() {
    SHARDD_ASSIGN_OR_RETURN(const v1::JobRef request, Ref());
    SHARDD_ASSIGN_OR_RETURN(const v1::CloseJobByNameResponse response,
                            Call<v1::CloseJobByNameResponse>(&v1::JobsService::Stub::CloseJobByName, request));
    if (!response.existed()) {
      return NoSuchJob("close", options_.job);
    }
    return options_.json ? Json(response) : absl::StatusOr<std::string>(absl::StrCat("closed ", options_.job, "\n"));
  }

  absl::StatusOr<std::string> Trace() {
    SHARDD_ASSIGN_OR_RETURN(const v1::JobRef ref, Ref());
    absl::StatusOr<std::string> told = TraceToFile(*stub_, ref, options_);
    return absl::IsNotFound(told.status()) ? NoSuchJob("trace", ref.job()) : std::move(told);
  }

  const std::unique_ptr<v1::JobsService::Stub> stub_;
  const std::string address_;
  const Options& options_;
  v1::GetMetricsResponse* const past_;
  View view_;
};

int Fail(const absl::Status& status) {
  std::fflush(stdout);
  std::fprintf(stderr, "shardctl: %s\n", std::string(status.message()).c_str());
  return ExitCodeOf(status);
}

// One connection for all of --watch; a daemon that went away ends it.
absl::Status AskAndPrint(Options options) {
  SHARDD_ASSIGN_OR_RETURN(options.job_secret, options.job_secret_file.empty()
                                                  ? ReadJobSecret()
                                                  : ReadJobSecretFile(options.job_secret_file));
  SHARDD_ASSIGN_OR_RETURN(Connection connection, ConnectToDaemon(options.address));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomInsecureChannelFromFd("shardd", connection.socket.release(), arguments);
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const bool color = terminal && Environment("NO_COLOR").empty();
  const bool watching = options.watch > absl::ZeroDuration();
  v1::GetMetricsResponse past;
  for (bool first = true;; first = false) {
    SHARDD_ASSIGN_OR_RETURN(const std::string text, Execute(channel, connection.path, options, color, &past));
    if (watching && !options.json) {
      std::fputs(terminal ? kClearScreen : first ? "" : "\n", stdout);
    }
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
      return absl::InternalError("print: standard output cannot be written");
    }
    if (!watching) {
      return absl::OkStatus();
    }
    absl::SleepFor(options.watch);
  }
}

}  // namespace

absl::StatusOr<std::string> Execute(const std::shared_ptr<grpc::Channel>& channel, const std::string& address,
                                    const Options& options, bool color, v1::GetMetricsResponse* past) {
  return Executor(channel, address, options, color, past).Execute();
}

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
      return kExitUsage;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitNotReachable;
    case absl::StatusCode::kOutOfRange:  // trace.h
      return kExitTraceTimeout;
    default:
      return kExitError;
  }
}

int Run(const Options& options) {
  if (options.command == Command::kHelp || options.command == Command::kVersion) {
    std::fputs(options.text.c_str(), stdout);
    return kExitOk;
  }
  const absl::Status status = AsksNoDaemon(options.command) ? RunOffline(options) : AskAndPrint(options);
  if (!status.ok()) {
    return Fail(status);
  }
  return kExitOk;
}

}  // namespace shardd::ctl
