#ifndef SHARDD_SERVER_HANDOVER_SUCCESSOR_H_
#define SHARDD_SERVER_HANDOVER_SUCCESSOR_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/process/spawn.h"

namespace shardd {

// Starts the daemon that is to take this one's place: the program that lies where this one was started from, which an
// upgrade has replaced, with the same arguments and --take_over. Thread-compatible.
class Successor {
 public:
  // `arguments` are those of main. REQUIRES: the program's file was not replaced yet.
  explicit Successor(const std::vector<std::string>& arguments);

  // FAILED_PRECONDITION: one is starting already, or the end of this process would end it too. Errors of the start.
  absl::Status Start();
  // Why the one that was started does not come, once: it has ended, or is not ready within kStartLimit and is ended.
  // OK: there is none, or it is on its way. To be called every so often.
  absl::Status Review();
  // Ends the one that was started, if one is there.
  void Terminate();
  // Behind the handover: until somebody listens at `path`, the one that was started or another. Blocks. UNAVAILABLE:
  // nobody does within kListenLimit, or the one that was started has ended.
  absl::Status AwaitListening(const std::string& path);
  // 0: none was started, or it has ended.
  pid_t pid() const { return process_.pid; }

 private:
  bool HasEnded() const;

  std::string program_;
  std::vector<std::string> arguments_;
  DetachedProcess process_;
  absl::Time deadline_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_HANDOVER_SUCCESSOR_H_
