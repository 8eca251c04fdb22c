#ifndef SHARDD_TESTS_FAULTS_HOSTILE_HTTP2_CLIENT_H_
#define SHARDD_TESTS_FAULTS_HOSTILE_HTTP2_CLIENT_H_

// An HTTP/2 client that writes its frames by hand, and reads none of what it is answered but throws it away.

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/strings/string_view.h"
#include "common/shm/unique_fd.h"

namespace shardd::faults::http2 {

enum FrameType : uint8_t { kHeaders = 1, kRstStream = 3, kSettings = 4, kPing = 6 };

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload = "");
// What a client says first.
std::string Preface();
// The begin of a call of `method` ("/shardd.v1.JobsService/GetDaemon").
std::string Call(uint32_t stream, absl::string_view method);
std::string Reset(uint32_t stream);

// To "localhost:port", from an address of this host; invalid: nobody listens there.
UniqueFd ConnectToPort(const std::string& address, const char* from = "127.0.0.2");

// One connection. A thread of its own reads.
class Client {
 public:
  explicit Client(UniqueFd socket);
  ~Client();
  // Blocks while the daemon takes nothing. False: the connection is closed.
  bool Send(absl::string_view bytes);
  // Ends a Send that blocks.
  void Close();
  bool closed() const { return closed_; }

 private:
  UniqueFd socket_;
  std::atomic<bool> closed_ = false;
  std::thread reading_;
};

}  // namespace shardd::faults::http2

#endif  // SHARDD_TESTS_FAULTS_HOSTILE_HTTP2_CLIENT_H_
