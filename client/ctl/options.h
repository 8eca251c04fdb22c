#ifndef SHARDD_CLIENT_CTL_OPTIONS_H_
#define SHARDD_CLIENT_CTL_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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
  kRanks,
  kGroups,
  kParams,
  kMemory,
  kStreams,
  kEvents,
  kClose,
  kTrace,
};

struct Options {
  Command command = Command::kHelp;
  std::string help_of;          // help: of this command; empty: of all
  std::string job;              // empty: not given
  std::optional<uint32_t> uid;  // whose job
  std::string address;          // empty: the default order
  std::string job_secret_file;  // empty: as the environment says
  std::string job_secret;       // what it contains; Run fills it in
  bool json = false;
  bool handles = false;               // ranks: also the state of each parameter group
  int limit = 0;                      // events; 0: the daemon's default
  std::string output = "trace.json";  // trace: "-" is standard output
  int steps = 0;                      // trace; 0: the daemon's default
  // Zero: 10 s for one request, 60 s for a trace.
  absl::Duration timeout = absl::ZeroDuration();
  absl::Duration watch = absl::ZeroDuration();  // zero: once
};

// `arguments` without the program's name; options may stand anywhere, as "--x=y" or "--x y".
// INVALID_ARGUMENT: a usage error, told in one line.
absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& arguments);

// Of one command, by name; empty, or not a command's: of all.
std::string HelpText(absl::string_view command = "");

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_OPTIONS_H_
