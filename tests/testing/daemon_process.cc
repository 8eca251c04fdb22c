#include "tests/testing/daemon_process.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "tests/testing/programs.h"

namespace shardd::testing {
namespace {

bool Accepts(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  return connected;
}

std::vector<std::string> Command(const std::string& program, const DaemonProcess& daemon, const std::string& devices,
                                 const std::vector<std::string>& flags) {
  std::vector<std::string> command = {program.empty() ? ProgramPath("shardd") : program, "--listen=" + daemon.address(),
                                      "--devices=" + devices};
  // What a trial finds, and the calls that it makes, are no test's business but its own.
  if (devices.rfind("cuda:", 0) == 0) command.emplace_back("--collective=local");
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

}  // namespace

DaemonProcess::DaemonProcess(const std::string& folder, const std::string& devices,
                             const std::vector<std::string>& flags, const std::vector<std::string>& environment,
                             const std::string& program)
    : folder_(folder),
      process_(Spawn(Command(program, *this, devices, flags),
                     {.environment = environment, .log = log(), .own_group = true})) {
  PollUntil([this] { return (listened_ = Accepts(socket_path())) || process_.Ended(); });
}

}  // namespace shardd::testing
