#ifndef SHARDD_TESTS_TESTING_TCP_PROXY_H_
#define SHARDD_TESTS_TESTING_TCP_PROXY_H_

// A middlebox between two programs of this host: forwards TCP connections, and harms them as it is told.

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd::testing {

// Listens on a port of 127.0.0.1 and connects each caller to `target_port` of it. Thread-safe.
class TcpProxy {
 public:
  enum class Fault {
    kNone,
    kRefuse,       // at once: the caller is reset, the target never hears of it
    kDelay,        // every byte travels for `delay`, from the beginning
    kDuplicate,    // the target gets the caller's bytes on a second connection, too; its answers there are dropped
    kClose,        // both sides see an orderly end
    kReset,        // both sides are reset
    kResetCaller,  // one side is reset, the other one hears nothing any more
    kResetTarget,
    kFinToCaller,  // one direction ends in order, the other one goes on
    kFinToTarget,
    kSilence,  // both sides hear nothing any more
  };
  static constexpr int kFaults = static_cast<int>(Fault::kSilence) + 1;
  // What happens to one connection, when `after_bytes` have come through it, both directions counted.
  struct Harm {
    Fault fault = Fault::kNone;
    int64_t after_bytes = 0;
    absl::Duration delay;
  };
  using Choose = std::function<Harm()>;  // for each connection, on the proxy's thread

  explicit TcpProxy(int target_port, Choose choose = nullptr);
  ~TcpProxy();  // resets every connection
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  int port() const { return port_; }
  std::string address() const;
  int accepted() const { return accepted_; }
  // For connections that come from now on. Null: none is harmed.
  void SetChoose(Choose choose) ABSL_LOCKS_EXCLUDED(mutex_);
  // Does this to all connections that are there. One of the last seven. Has happened when it returns.
  void HarmAll(Fault fault) ABSL_LOCKS_EXCLUDED(mutex_);
  // Harms about two of three connections, by a generator that begins with `seed`.
  static Choose Random(uint64_t seed);

 private:
  struct Chunk {
    absl::Time due;
    std::string bytes;
  };
  struct Way {
    std::list<Chunk> queue;
    int64_t queued_bytes = 0;
    bool read_end = false;   // its source has ended
    bool write_end = false;  // its destination was told
  };
  struct Connection {
    UniqueFd caller, target, copy;
    Harm harm;
    bool harmed = false;
    bool silent = false;
    int64_t bytes = 0;
    Way up, down;  // to the target, to the caller
  };
  void Run();
  void Accept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Read(Connection& connection, bool up);
  static void Write(Connection& connection, bool up);
  static void Apply(Connection& connection, Fault fault);
  static bool Ended(const Connection& connection);

  UniqueFd listener_;
  UniqueFd wake_;
  const int target_port_;
  int port_ = 0;
  std::atomic<int> accepted_ = 0;
  absl::Mutex mutex_;
  Choose choose_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_TCP_PROXY_H_
