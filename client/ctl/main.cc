// shardctl: the operator's view of the daemon; options.cc says what it takes.

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "client/ctl/commands.h"
#include "client/ctl/options.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const absl::StatusOr<shardd::ctl::Options> options = shardd::ctl::ParseOptions(arguments);
  int code = shardd::ctl::kExitUsage;
  if (options.ok()) {
    code = shardd::ctl::Run(*options);
  } else {
    std::fprintf(stderr, "shardctl: %s\n", std::string(options.status().message()).c_str());
  }
  std::fflush(stdout);
  // gRPC's own shutdown can wait ten seconds for a thread that has nothing left to do.
  ::_exit(code);
}
