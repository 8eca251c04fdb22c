#include "client/ctl/options.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace shardd::ctl {
namespace {

enum class TakesJob { kNo, kOptional, kRequired };

struct CommandRow {
  absl::string_view name;
  Command command;
  TakesJob takes_job;
  absl::string_view help;
};

constexpr CommandRow kCommands[] = {
    {"status", Command::kStatus, TakesJob::kNo, "the daemon: version, devices, memory, isolation"},
    {"jobs", Command::kJobs, TakesJob::kNo, "all jobs that you may see"},
    {"job", Command::kJob, TakesJob::kOptional, "one job: state, sharding configuration, counters"},
    {"ranks", Command::kRanks, TakesJob::kOptional, "its ranks: state, last command, what each waits for (--handles)"},
    {"groups", Command::kGroups, TakesJob::kOptional, "its parameter groups"},
    {"params", Command::kParams, TakesJob::kOptional, "its parameters: shape, group, elements in each rank's shard"},
    {"memory", Command::kMemory, TakesJob::kOptional, "its memory by purpose, planned and allocated"},
    {"streams", Command::kStreams, TakesJob::kNo, "the devices' streams: operations submitted, done, running"},
    {"events", Command::kEvents, TakesJob::kOptional, "newest events, of all jobs where none is named (--limit)"},
    {"trace", Command::kTrace, TakesJob::kOptional,
     "what ranks and daemon do over the next steps, for ui.perfetto.dev"},
    {"close", Command::kClose, TakesJob::kRequired, "end a job and free its memory at once"},
    {"version", Command::kVersion, TakesJob::kNo, "version of this program"},
    {"help", Command::kHelp, TakesJob::kNo, "this text"},
};

struct OptionRow {
  absl::string_view name;     // as it is given
  absl::string_view shown;    // in help
  absl::string_view command;  // the one that has it; empty: each that asks a daemon
  absl::string_view help;     // lines
  absl::string_view short_name = "";
  bool takes_value = true;
};

constexpr OptionRow kOptions[] = {
    {"--address", "--address ADDR", "",
     "unix:/path or /path; default: SHARDD_ADDRESS, else the first that listens of\n/run/shardd/shardd.sock, "
     "$XDG_RUNTIME_DIR/shardd/shardd.sock, /tmp/shardd-UID/shardd.sock"},
    {"--uid", "--uid UID", "", "whose jobs, where several users have one of a name and you may see them"},
    {"--job_secret_file", "--job_secret_file FILE", "",
     "with the secret of your job, where it has one; default: SHARDD_JOB_SECRET,\nelse SHARDD_JOB_SECRET_FILE"},
    {"--json", "--json", "", "the answer as protobuf JSON (64-bit numbers are strings); with --watch one line each", "",
     false},
    {"--watch", "--watch SECONDS", "", "repeat until interrupted"},
    {"--limit", "--limit N", "events", "the newest N (default 100)"},
    {"--handles", "--handles", "ranks", "also storage and training state of each parameter group", "", false},
    {"--steps", "--steps N", "trace", "whole steps to record (default 3)"},
    {"--output", "-o, --output FILE", "trace", "where to write it (default trace.json; -: standard output)", "-o"},
    {"--timeout", "--timeout SECONDS", "",
     "of one request (default 10); trace: for the steps to be there (default 60)"},
};

const OptionRow* FindOption(absl::string_view name) {
  for (const OptionRow& row : kOptions) {
    if (name == row.name || (name == row.short_name && !name.empty())) {
      return &row;
    }
  }
  return nullptr;
}

const CommandRow* FindCommand(absl::string_view name) {
  for (const CommandRow& row : kCommands) {
    if (row.name == name) {
      return &row;
    }
  }
  return nullptr;
}

absl::Status UsageError(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat(text, "; see shardctl help"));
}

absl::StatusOr<absl::Duration> ParseSeconds(absl::string_view option, const std::string& value) {
  double seconds = 0;
  // "0.5" as sleep(1) has it; also absl's own "500ms".
  if (absl::Duration parsed; absl::ParseDuration(value, &parsed) && parsed > absl::ZeroDuration()) {
    return parsed;
  }
  if (!absl::SimpleAtod(value, &seconds) || !(seconds > 0) || seconds > 1e9) {
    return UsageError(absl::StrCat(option, ": not a time in seconds (got \"", value, "\", want more than 0)"));
  }
  return absl::Seconds(seconds);
}

// What the loop over the arguments has found so far.
class Parser {
 public:
  explicit Parser(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  absl::StatusOr<Options> Parse() {
    while (next_ < arguments_.size()) {
      const std::string& argument = arguments_[next_++];
      const absl::Status status =
          absl::StartsWith(argument, "-") && argument != "-" ? ParseOption(argument) : ParseWord(argument);
      if (!status.ok()) {
        return status;
      }
    }
    if (const absl::Status status = Check(); !status.ok()) {
      return status;
    }
    return std::move(options_);
  }

 private:
  absl::Status ParseOption(const std::string& argument) {
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const bool has_value = equals != std::string::npos;
    const bool asks_for_text = name == "--help" || name == "-h" || name == "--version";
    const OptionRow* const row = FindOption(name);
    if (row == nullptr && !asks_for_text) {
      return UsageError(absl::StrCat("unknown option \"", name, "\""));
    }
    if (asks_for_text || !row->takes_value) {
      if (has_value) {
        return UsageError(absl::StrCat(name, ": takes no value"));
      }
      if (name == "--json") {
        options_.json = true;
      } else if (name == "--handles") {
        options_.handles = true;
      } else {
        forced_ = FindCommand(name == "--version" ? "version" : "help");
      }
      return absl::OkStatus();
    }
    std::string value;
    if (has_value) {
      value = argument.substr(equals + 1);
    } else if (next_ < arguments_.size()) {
      value = arguments_[next_++];
    } else {
      return UsageError(absl::StrCat(name, ": value is missing"));
    }
    if (name == "--address") {
      options_.address = value;
      return value.empty() ? UsageError("--address: value is empty") : absl::OkStatus();
    }
    if (name == "--job_secret_file") {
      options_.job_secret_file = value;
      return value.empty() ? UsageError("--job_secret_file: value is empty") : absl::OkStatus();
    }
    if (name == "--uid") {
      uint32_t uid = 0;
      if (!absl::SimpleAtoi(value, &uid)) {
        return UsageError(absl::StrCat("--uid: not a uid (got \"", value, "\", want a number)"));
      }
      options_.uid = uid;
      return absl::OkStatus();
    }
    if (name == "--output" || name == "-o") {
      options_.output = value;
      return value.empty() ? UsageError(absl::StrCat(name, ": value is empty")) : absl::OkStatus();
    }
    if (name == "--steps") {
      if (!absl::SimpleAtoi(value, &options_.steps) || options_.steps < 1 || options_.steps > 1000) {
        return UsageError(absl::StrCat("--steps: not a number of steps (got \"", value, "\", want 1 to 1000)"));
      }
      return absl::OkStatus();
    }
    if (name == "--limit") {
      if (!absl::SimpleAtoi(value, &options_.limit) || options_.limit < 1) {
        return UsageError(absl::StrCat("--limit: not a number of events (got \"", value, "\", want 1 or more)"));
      }
      return absl::OkStatus();
    }
    const absl::StatusOr<absl::Duration> duration = ParseSeconds(name, value);
    if (duration.ok()) {
      (name == "--watch" ? options_.watch : options_.timeout) = *duration;
    }
    return duration.status();
  }

  absl::Status ParseWord(const std::string& word) {
    if (row_ == nullptr) {
      row_ = FindCommand(word);
      return row_ == nullptr ? UsageError(absl::StrCat("unknown command \"", word, "\"")) : absl::OkStatus();
    }
    if (row_->takes_job == TakesJob::kNo || !options_.job.empty() || word.empty()) {
      return UsageError(absl::StrCat(row_->name, ": unexpected argument \"", word, "\""));
    }
    options_.job = word;
    return absl::OkStatus();
  }

  absl::Status Check() {
    if (forced_ != nullptr) {
      if (row_ != nullptr && row_->command != Command::kHelp) {
        options_.help_of = std::string(row_->name);
      }
      row_ = forced_;
    }
    if (row_ == nullptr) {
      return UsageError("command is missing");
    }
    options_.command = row_->command;
    if (forced_ == nullptr && row_->takes_job == TakesJob::kRequired && options_.job.empty()) {
      return UsageError(absl::StrCat(row_->name, ": name of the job is missing"));
    }
    if (options_.watch > absl::ZeroDuration() && options_.command == Command::kClose) {
      return UsageError("close: --watch would close again and again");
    }
    if (options_.command == Command::kTrace) {
      if (options_.watch > absl::ZeroDuration()) {
        return UsageError("trace: --watch would write the same file again and again");
      }
      if (options_.json) {
        return UsageError("trace: --json has no meaning, a trace is JSON; -o says where it goes");
      }
      if (options_.timeout > absl::Minutes(10)) {
        return UsageError(absl::StrCat("trace: --timeout is too long (got ", absl::FormatDuration(options_.timeout),
                                       ", want at most 10m)"));
      }
    }
    if (options_.timeout == absl::ZeroDuration()) {
      options_.timeout = options_.command == Command::kTrace ? absl::Seconds(60) : absl::Seconds(10);
    }
    return absl::OkStatus();
  }

  const std::vector<std::string>& arguments_;
  size_t next_ = 0;
  Options options_;
  const CommandRow* row_ = nullptr;
  const CommandRow* forced_ = nullptr;
};

}  // namespace

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments) { return Parser(arguments).Parse(); }

namespace {

std::string Synopsis(const CommandRow& row) {
  return absl::StrCat(row.name, row.takes_job == TakesJob::kNo         ? ""
                                : row.takes_job == TakesJob::kOptional ? " [JOB]"
                                                                       : " JOB");
}

// Whether the command asks a daemon: the others have no options.
bool AsksDaemon(const CommandRow& row) { return row.command != Command::kVersion && row.command != Command::kHelp; }

// Options of `command`; null: of all, with the command that has them.
void AppendOptions(const CommandRow* command, std::string* text) {
  for (const OptionRow& row : kOptions) {
    if (command != nullptr && !row.command.empty() && row.command != command->name) {
      continue;
    }
    const bool says_whose = command == nullptr && !row.command.empty();
    absl::StrAppendFormat(text, "  %-18s %s%s\n", row.shown, says_whose ? absl::StrCat(row.command, ": ") : "",
                          absl::StrReplaceAll(row.help, {{"\n", "\n                     "}}));
  }
}

constexpr absl::string_view kOneJob = "JOB may be left out where there is only one job.\n";
constexpr absl::string_view kTraceText =
    "A trace shows unshard, compute, reshard, reduce and step of each rank and each stream of the devices. Open the\n"
    "file at https://ui.perfetto.dev (it does not leave the browser) or at chrome://tracing. One that ended early\n"
    "is written too, unless it has no whole step and a file lies there; the exit code says so: 1 where the job\n"
    "ended, 5 where the time was over.\n";

}  // namespace

std::string HelpText(absl::string_view command) {
  if (const CommandRow* row = FindCommand(command); row != nullptr) {
    std::string text = absl::StrCat("shardctl ", row->name, ": ", row->help, "\n\nusage: shardctl ", Synopsis(*row),
                                    AsksDaemon(*row) ? " [OPTION...]\n" : "\n");
    if (row->takes_job == TakesJob::kOptional) {
      absl::StrAppend(&text, kOneJob);
    }
    if (AsksDaemon(*row)) {
      absl::StrAppend(&text, "\noptions:\n");
      AppendOptions(row, &text);
    }
    if (row->command == Command::kTrace) {
      absl::StrAppend(&text, "\n", kTraceText);
    }
    return text;
  }
  std::string text =
      "shardctl: what the shardd of this node holds and does\n"
      "\n"
      "usage: shardctl COMMAND [JOB] [OPTION...]\n"
      "       shardctl COMMAND --help\n"
      "\n"
      "commands:\n";
  for (const CommandRow& row : kCommands) {
    absl::StrAppendFormat(&text, "  %-14s %s\n", Synopsis(row), row.help);
  }
  absl::StrAppend(&text, kOneJob, "\noptions:\n");
  AppendOptions(nullptr, &text);
  absl::StrAppend(&text, "\n", kTraceText,
                  "\n"
                  "exit codes:\n"
                  "  0  done\n"
                  "  1  the daemon answered with an error\n"
                  "  2  usage error\n"
                  "  3  no such job\n"
                  "  4  no daemon was reached, or it did not answer in time\n"
                  "  5  trace: the time was over before the steps were there\n"
                  "\n"
                  "Colours appear on a terminal only, and not where NO_COLOR is set.\n");
  return text;
}

}  // namespace shardd::ctl
