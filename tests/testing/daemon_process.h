#ifndef SHARDD_TESTS_TESTING_DAEMON_PROCESS_H_
#define SHARDD_TESTS_TESTING_DAEMON_PROCESS_H_

#include <string>
#include <vector>

#include "tests/testing/process.h"

namespace shardd::testing {

// A daemon of this build with socket and log in one folder. Killed with this object at the latest.
class DaemonProcess {
 public:
  // Waits until it accepts connections, has ended, or kLimit has passed. `folder` outlives this.
  // `flags` come last; `environment` is "NAME=value", in place of this process's where both have one. `program`: a copy
  // of the daemon; empty: this build's.
  DaemonProcess(const std::string& folder, const std::string& devices, const std::vector<std::string>& flags = {},
                const std::vector<std::string>& environment = {}, const std::string& program = "");
  // When the constructor returned; else log() says why not.
  bool listened() const { return listened_; }
  std::string address() const { return "unix:" + socket_path(); }
  std::string socket_path() const { return folder_ + "/shardd.sock"; }
  std::string log() const { return folder_ + "/daemon.log"; }  // the file
  pid_t pid() const { return process_.pid(); }
  Child& process() { return process_; }

 private:
  const std::string folder_;
  Child process_;
  bool listened_ = false;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_DAEMON_PROCESS_H_
