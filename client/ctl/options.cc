#include "client/ctl/options.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/ctl/offline.h"
#include "client/ctl/predict/predict.h"
#include "common/plan/plan.h"
#include "common/version.h"
#include "common/versions/versions.h"

namespace shardd::ctl {
namespace {

enum class TakesJob { kNo, kOptional, kOrAll, kRequired };

struct CommandRow {
  const char* name;
  Command command;
  TakesJob takes_job;
  const char* help;
};

constexpr CommandRow kCommands[] = {
    {"status", Command::kStatus, TakesJob::kNo, "the daemon: version, devices, memory, isolation"},
    {"jobs", Command::kJobs, TakesJob::kNo, "all jobs that you may see"},
    {"job", Command::kJob, TakesJob::kOptional, "one job: state, sharding configuration, counters"},
    {"top", Command::kTop, TakesJob::kOrAll,
     "a live table of all jobs, or of one and its ranks: pace, goodput, who is waited for (--once)"},
    {"ranks", Command::kRanks, TakesJob::kOptional, "its ranks: state, last command, what each waits for (--handles)"},
    {"groups", Command::kGroups, TakesJob::kOptional, "its parameter groups"},
    {"params", Command::kParams, TakesJob::kOptional, "its parameters: shape, group, elements in each rank's shard"},
    {"memory", Command::kMemory, TakesJob::kOptional, "its memory by purpose, planned and allocated"},
    {"streams", Command::kStreams, TakesJob::kNo, "the devices' streams: operations submitted, done, running"},
    {"events", Command::kEvents, TakesJob::kOrAll, "newest events, of all jobs where none is named (--limit)"},
    {"history", Command::kHistory, TakesJob::kOrAll,
     "steps and events of the past, also of jobs that have ended (--since, --limit)"},
    {"why", Command::kWhy, TakesJob::kRequired,
     "its last aborts in plain words, with what each rank did last (--since)"},
    {"trace", Command::kTrace, TakesJob::kOptional,
     "what ranks and daemon do over the next steps, for ui.perfetto.dev"},
    {"handover", Command::kHandover, TakesJob::kNo, "a new daemon takes this one's place while jobs train"},
    {"plan", Command::kPlan, TakesJob::kNo,
     "what memory a model will need, before anything runs (--world, --nodes, --gpus)"},
    {"predict", Command::kPredict, TakesJob::kNo,
     "how long a step will take, and what of it is waiting, from a description of the machine (--machine, --tokens)"},
    {"close", Command::kClose, TakesJob::kRequired, "end a job and free its memory at once"},
    {"version", Command::kVersion, TakesJob::kNo, "version of this program"},
    {"help", Command::kHelp, TakesJob::kNo, "this text, or that of the command that follows"},
};

constexpr char kTraceText[] =
    "A trace shows unshard, compute, reshard, reduce and step of each rank and each stream of the devices. Open the\n"
    "file at https://ui.perfetto.dev (it does not leave the browser) or at chrome://tracing. One that ended early\n"
    "is written too, unless it has no whole step and a file lies there; the exit code says so: 1 where the job\n"
    "ended, 5 where the time was over.";
constexpr char kTopText[] =
    "Figures are means over the steps since the table before. STEPS/S goes down while the next commit takes longer.\n"
    "GOODPUT: the share of the job's time in steps that stand, without waiting for one slow rank. AWAITED: the share\n"
    "of their time for which the others waited for that rank.";
constexpr char kPlanText[] =
    "The model is a shardd.v1.JobSpec as JSON: spec of shardd.torch.memory_plan(model), or what a C or C++ program\n"
    "attaches with. Bytes are of one node with all its ranks; the daemon plans the same. No daemon is asked.";
constexpr char kPredictText[] =
    "The daemon's own schedule of gathers and prefetches, on links and kernels as the machine's file describes them\n"
    "(client/docs/configuration.md#prediction). All ranks are taken to be alike. More nodes than are served are\n"
    "predicted all the same. No daemon is asked.";
constexpr char kClosingText[] =
    "shardctl COMMAND --help lists the options of that command. The options above may stand before a command, too.\n"
    "\n"
    "exit codes:\n"
    "  0  done\n"
    "  1  the daemon answered with an error\n"
    "  2  usage error\n"
    "  3  no such job\n"
    "  4  no daemon was reached, or it did not answer in time\n"
    "  5  trace: the time was over before the steps were there\n"
    "\n"
    "Colours appear on a terminal only, and not where NO_COLOR is set.";

// Reads "0.5" as sleep(1) has it, and absl's own "500ms". Zero: it is neither, or not more than zero.
absl::Duration ParseSeconds(const std::string& text) {
  double seconds = 0;
  absl::Duration duration;
  if (absl::SimpleAtod(text, &seconds)) {
    return seconds > 0 && seconds <= 1e9 ? absl::Seconds(seconds) : absl::ZeroDuration();
  }
  return absl::ParseDuration(text, &duration) ? std::max(duration, absl::ZeroDuration()) : absl::ZeroDuration();
}

void AddSeconds(CLI::App* app, const std::string& name, absl::Duration* value, const std::string& help) {
  app->add_option_function<std::string>(
         name, [value](const std::string& text) { *value = ParseSeconds(text); }, help)
      ->check([](const std::string& text) {
        return ParseSeconds(text) > absl::ZeroDuration()
                   ? ""
                   : absl::StrCat("not a time in seconds (got \"", text, "\", want more than 0)");
      })
      ->type_name("SECONDS");
}

// Of everything that asks a daemon.
void AddCommonOptions(CLI::App* app, Options* options) {
  app->add_option(
         "--address", options->address,
         "unix:/path or /path; default: SHARDD_ADDRESS, else the first that listens of\n/run/shardd/shardd.sock, "
         "$XDG_RUNTIME_DIR/shardd/shardd.sock, /tmp/shardd-UID/shardd.sock")
      ->type_name("ADDR");
  app->add_option("--uid", options->uid, "whose jobs, where several users have one of a name and you may see them")
      ->check(CLI::Range(0u, std::numeric_limits<uint32_t>::max()).description(""))
      ->type_name("UID");
  app->add_option("--job_secret_file", options->job_secret_file,
                  "with the secret of your job, where it has one; default: SHARDD_JOB_SECRET,\n"
                  "else SHARDD_JOB_SECRET_FILE")
      ->type_name("FILE");
  app->add_flag(
         "--json", options->json,
         "the answer as protobuf JSON (64-bit numbers are strings); with --watch one line each; top: its\nfigures "
         "as numbers, one line each")
      ->disable_flag_override();
  AddSeconds(app, "--watch", &options->watch, "repeat until interrupted");
  AddSeconds(
      app, "--timeout", &options->timeout,
      "of one request (default 10); trace: for the steps to be there (default 60); handover: for\nthe next daemon "
      "(default 180)");
}

void AddModelOptions(CLI::App* app, Options* options, int most_nodes) {
  app->add_option("MODEL", options->model, "the file; -: standard input")->required()->option_text(" ");
  app->add_option("--world", options->world, "ranks of all nodes together (default: as the model says)")
      ->check(CLI::Range(1, most_nodes * kMaxWorldSize).description(""))
      ->type_name("N");
  app->add_option("--nodes", options->nodes, "nodes (default: as the model says, otherwise 1)")
      ->check(CLI::Range(1, most_nodes).description(""))
      ->type_name("N");
}

void AddOwnOptions(CLI::App* app, Command command, Options* options) {
  if (command == Command::kEvents) {
    app->add_option("--limit", options->limit, "the newest N (default 100)")
        ->check(CLI::Range(1, std::numeric_limits<int>::max()).description(""))
        ->type_name("N");
  } else if (command == Command::kHistory || command == Command::kWhy) {
    app->add_option_function<std::string>(
           "--since", [options](const std::string& text) { absl::ParseDuration(text, &options->since); },
           "how far back, as in 24h or 90m (default: all that is kept)")
        ->check([](const std::string& text) {
          absl::Duration since;
          return absl::ParseDuration(text, &since) && since > absl::ZeroDuration()
                     ? ""
                     : absl::StrCat("not a time (got \"", text, "\", want one as in 24h, 90m or 30s)");
        })
        ->type_name("TIME");
    if (command == Command::kHistory) {
      app->add_option("--limit", options->limit, "the newest N lines (default 1000)")
          ->check(CLI::Range(1, 10'000).description(""))
          ->type_name("N");
    }
  } else if (command == Command::kTop) {
    app->add_flag("--once", options->once, "one table, of each job's last step, for scripts (default: one a second)")
        ->disable_flag_override();
    app->footer(kTopText);
  } else if (command == Command::kRanks) {
    app->add_flag("--handles", options->handles, "also storage and training state of each parameter group");
  } else if (command == Command::kTrace) {
    app->add_option("--steps", options->steps, "whole steps to record (default 3)")
        ->check(CLI::Range(1, 1000).description(""))
        ->type_name("N");
    app->add_option("-o,--output", options->output, "where to write it (default trace.json; -: standard output)")
        ->transform([](const std::string& file) { return std::string(absl::StripPrefix(file, "=")); })  // -o=FILE
        ->type_name("FILE");
    app->footer(kTraceText);
  } else if (command == Command::kPredict) {
    AddModelOptions(app, options, kMostPredictedNodes);
    app->add_option("--machine", options->machine, "the file that describes a rank and its links")
        ->required()
        ->type_name("FILE");
    app->add_option("--tokens", options->tokens, "tokens of one rank and step")
        ->required()
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 40).description(""))
        ->type_name("N");
    app->add_flag("--checkpointing", options->checkpointing, "backward computes each group's forward again")
        ->disable_flag_override();
    app->add_option("--svg", options->picture, "draw the step's streams there")->type_name("FILE");
    app->add_flag("--json", options->json, "as JSON, in seconds and bytes")->disable_flag_override();
    app->footer(kPredictText);
  } else if (command == Command::kPlan) {
    AddModelOptions(app, options, kMaxNodes);
    app->add_flag("--gpus", options->gpus, "ranks have GPUs (makes a difference to parameters that are cut over nodes)")
        ->disable_flag_override();
    app->add_flag("--json", options->json, "as shardctl memory --json will have it")->disable_flag_override();
    app->footer(kPlanText);
  }
}

void Describe(CLI::App* app, Options* options) {
  const std::shared_ptr<CLI::FormatterBase> formatter = app->get_formatter();
  formatter->column_width(26);
  formatter->label("Usage", "usage");
  formatter->label("OPTIONS", "OPTION...");
  formatter->label("SUBCOMMAND", "COMMAND");
  formatter->label("Positionals", "arguments");
  app->option_defaults()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->group("options");                        // scripts add theirs
  app->set_help_flag("-h,--help", "this text");  // again: the first one is in no group of ours
  app->set_version_flag("--version", options->text, "version of this program");
  app->require_subcommand(1);
  AddCommonOptions(app, options);
  for (const CommandRow& row : kCommands) {
    CLI::App* const command = app->add_subcommand(row.name, row.help)->group("commands");
    command->get_help_ptr()->group("options");
    command->final_callback([options, &row] { options->command = row.command; });
    if (row.takes_job != TakesJob::kNo) {
      const bool required = row.takes_job == TakesJob::kRequired;
      command
          ->add_option("JOB", options->job,
                       required                            ? "its name"
                       : row.takes_job == TakesJob::kOrAll ? "its name; left out: all jobs"
                                                           : "its name; may be left out where there is one job")
          ->required(required)
          ->option_text(" ");
    }
    AddOwnOptions(command, row.command, options);
    if (row.command != Command::kVersion && row.command != Command::kHelp && !AsksNoDaemon(row.command)) {
      AddCommonOptions(command, options);
    }
  }
  app->footer(kClosingText);  // last: commands have their parent's
}

// What is wrong with options that are right each by itself; empty: nothing.
std::string Contradiction(const Options& options) {
  const bool trace = options.command == Command::kTrace;
  if (options.watch > absl::ZeroDuration() && options.command == Command::kClose) {
    return "--watch would close again and again";
  }
  if (options.watch > absl::ZeroDuration() && options.command == Command::kHandover) {
    return "--watch would hand over again and again";
  }
  if (options.watch > absl::ZeroDuration() && trace) {
    return "--watch would write the same file again and again";
  }
  if (options.watch > absl::ZeroDuration() && options.once) {
    return "--once and --watch contradict each other";
  }
  if (options.json && trace) {
    return "--json has no meaning, a trace is JSON; -o says where it goes";
  }
  if (options.timeout > absl::Minutes(10) && trace) {
    return absl::StrCat("--timeout is too long (got ", absl::FormatDuration(options.timeout), ", want at most 10m)");
  }
  return "";
}

}  // namespace

absl::StatusOr<Options> ParseOptions(std::vector<std::string> arguments) {
  Options options;
  options.text = absl::StrCat("shardctl ", kVersion, " (protocol ", kProtocolVersions.Text(), ")\n");
  CLI::App app("shardctl: what the shardd of this node holds and does", "shardctl");
  Describe(&app, &options);
  std::string wrong;
  for (const std::string& argument : arguments) {
    if (absl::StartsWith(argument, "-") && absl::EndsWith(argument, "=")) {  // CLI11 would take the next argument
      wrong = absl::StrCat(absl::StripSuffix(argument, "="), ": value is empty");
    }
  }
  if (!arguments.empty() && arguments[0] == "help") {
    arguments[0] = "--help";
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(std::move(arguments));
    wrong = wrong.empty() ? Contradiction(options) : wrong;
    if (options.command == Command::kHelp) {  // behind options
      options.text = app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal);
    }
  } catch (const CLI::CallForVersion&) {
    options.command = Command::kVersion;
  } catch (const CLI::CallForHelp&) {
    options.command = Command::kHelp;
    options.text = app.help();
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> rest = app.remaining(true);
    const bool has_command = !app.get_subcommands().empty();
    if (!rest.empty()) {
      wrong = absl::StrCat(absl::StartsWith(rest[0], "-") ? "unknown option"
                           : has_command                  ? "unexpected argument"
                                                          : "unknown command",
                           " \"", rest[0], "\"");
    } else if (wrong.empty()) {
      const bool missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
      const bool plans = has_command && app.get_subcommands()[0]->get_name() == "plan";
      wrong = !missing      ? error.what()
              : plans       ? "file of the model is missing"
              : has_command ? "name of the job is missing"
                            : "command is missing";
    }
  }
  if (!wrong.empty()) {
    const std::string command = app.get_subcommands().empty() ? "" : app.get_subcommands()[0]->get_name();
    return absl::InvalidArgumentError(command.empty()
                                          ? absl::StrCat(wrong, "; see shardctl --help")
                                          : absl::StrCat(command, ": ", wrong, "; see shardctl ", command, " --help"));
  }
  if (options.timeout == absl::ZeroDuration()) {
    options.timeout = options.command == Command::kTrace      ? absl::Seconds(60)
                      : options.command == Command::kHandover ? absl::Seconds(180)
                      : options.command == Command::kClose ? absl::Seconds(40)  // over nodes it waits for their links
                                                           : absl::Seconds(10);
  }
  if (options.command == Command::kTop && !options.once && options.watch == absl::ZeroDuration()) {
    options.watch = absl::Seconds(1);
  }
  return options;
}

}  // namespace shardd::ctl
