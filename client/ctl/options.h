#ifndef SHARDD_CLIENT_CTL_OPTIONS_H_
#define SHARDD_CLIENT_CTL_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardd::ctl {

// For scripts; --help lists them.
enum ExitCode : int {
  kExitOk = 0,
  kExitError = 1,
  kExitUsage = 2,
  kExitNotFound = 3,
  kExitNotReachable = 4,
  kExitTraceTimeout = 5,
};

enum class Command {
  kHelp,
  kVersion,
  kStatus,
  kJobs,
  kJob,
  kTop,
  kRanks,
  kGroups,
  kParams,
  kMemory,
  kStreams,
  kEvents,
  kHistory,
  kWhy,
  kClose,
  kTrace,
  kHandover,
  kPlan,
  kPredict,
};

struct Options {
  Command command = Command::kHelp;
  std::string text;             // help, version: what to print
  std::string job;              // empty: not given
  std::optional<uint32_t> uid;  // whose job
  std::string address;          // empty: the default order
  std::string job_secret_file;  // empty: as the environment says
  std::string job_secret;       // what it contains; Run fills it in
  bool json = false;
  bool once = false;                            // top: one table
  bool handles = false;                         // ranks: also the state of each parameter group
  int limit = 0;                                // events, history; 0: the daemon's default
  absl::Duration since = absl::ZeroDuration();  // history, why: how far back; zero: all
  std::string output = "trace.json";            // trace: "-" is standard output
  int steps = 0;                                // trace; 0: the daemon's default
  std::string model;                            // plan, predict: the file; "-" is standard input
  int world = 0;                                // plan, predict: ranks of all nodes; 0: as the model says
  int nodes = 0;                                // plan, predict; 0: as the model says
  bool gpus = false;                            // plan: ranks have GPUs
  std::string machine;                          // predict: the file
  int64_t tokens = 0;                           // predict: of one rank and step
  bool checkpointing = false;                   // predict: backward computes forward again
  std::string picture;                          // predict: an SVG of the step; empty: none
  // Zero: 10 s for one request, 60 s for a trace, 180 s for a handover.
  absl::Duration timeout = absl::ZeroDuration();
  absl::Duration watch = absl::ZeroDuration();  // zero: once; top: a second, unless `once`
};

// Reads `arguments`, which lack the program's name. Options are "--x=y" or "--x y"; those that a command has for itself
// stand after it, the others anywhere. INVALID_ARGUMENT: a usage error, told in one line.
absl::StatusOr<Options> ParseOptions(std::vector<std::string> arguments);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_OPTIONS_H_
