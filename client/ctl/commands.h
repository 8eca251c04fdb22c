#ifndef SHARDD_CLIENT_CTL_COMMANDS_H_
#define SHARDD_CLIENT_CTL_COMMANDS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/options.h"
#include "grpcpp/channel.h"

namespace shardd::ctl {

// One request to the daemon behind `channel` and its answer as text, ready to print. Blocks up to options.timeout.
// INVALID_ARGUMENT: no job is named and there are several. NOT_FOUND: no such job.
// REQUIRES: the command is one that asks a daemon.
absl::StatusOr<std::string> Execute(const std::shared_ptr<grpc::Channel>& channel, const std::string& address,
                                    const Options& options, bool color);

ExitCode ExitCodeOf(const absl::Status& status);

// The whole program but for the arguments' parsing; prints to standard output and standard error.
int Run(const Options& options);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_COMMANDS_H_
