#include "tests/testing/tcp_proxy.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd::testing {
namespace {

constexpr int64_t kMaxQueuedBytes = 256 << 10;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kPollMs = 20;  // the longest, so that nothing is waited for in vain

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

UniqueFd Connect(int port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = Loopback(port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return UniqueFd();
  }
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  return fd;
}

void ResetNow(UniqueFd& fd) {
  if (fd.get() >= 0) {
    const linger now = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    fd.reset();
  }
}

}  // namespace

TcpProxy::TcpProxy(int target_port, Choose choose)
    : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      target_port_(target_port),
      choose_(std::move(choose)) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener_.get(), SOMAXCONN) != 0 ||
      getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    perror("proxy: listen on a port of 127.0.0.1");
    abort();
  }
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Run(); });
}

TcpProxy::~TcpProxy() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  eventfd_write(wake_.get(), 1);
  thread_.join();
  absl::MutexLock lock(&mutex_);
  for (Connection& connection : connections_) {
    Apply(connection, Fault::kReset);
  }
}

std::string TcpProxy::address() const { return absl::StrCat("127.0.0.1:", port_); }

void TcpProxy::SetChoose(Choose choose) {
  absl::MutexLock lock(&mutex_);
  choose_ = std::move(choose);
}

void TcpProxy::HarmAll(Fault fault) {
  {
    absl::MutexLock lock(&mutex_);
    for (Connection& connection : connections_) {
      Apply(connection, fault);
    }
  }
  eventfd_write(wake_.get(), 1);
}

TcpProxy::Choose TcpProxy::Random(uint64_t seed) {
  return [random = std::make_shared<std::mt19937_64>(seed)] {
    Harm harm;
    if ((*random)() % 3 != 0) {
      harm.fault = static_cast<Fault>(1 + (*random)() % (kFaults - 1));
    }
    // Within the handshake as often as behind it: from a byte to half a megabyte, by powers of two.
    const int64_t bound = int64_t{1} << ((*random)() % 20);
    harm.after_bytes = static_cast<int64_t>((*random)() % static_cast<uint64_t>(bound));
    harm.delay = absl::Milliseconds(1 + (*random)() % 30);
    return harm;
  };
}

void TcpProxy::Accept() {
  for (;;) {
    UniqueFd caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (caller.get() < 0) {
      return;
    }
    ++accepted_;
    const int on = 1;
    setsockopt(caller.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    Connection connection;
    connection.harm = choose_ ? choose_() : Harm();
    connection.caller = std::move(caller);
    if (connection.harm.fault != Fault::kRefuse) {
      connection.target = Connect(target_port_);
    }
    if (connection.target.get() < 0) {
      ResetNow(connection.caller);
      continue;
    }
    if (connection.harm.fault == Fault::kDuplicate) {
      connection.copy = Connect(target_port_);
    }
    connections_.push_back(std::move(connection));
  }
}

void TcpProxy::Apply(Connection& connection, Fault fault) {
  connection.harmed = true;
  switch (fault) {
    case Fault::kNone:
    case Fault::kRefuse:
    case Fault::kDelay:
    case Fault::kDuplicate:
      break;
    case Fault::kClose:
      connection.caller.reset();
      connection.target.reset();
      connection.copy.reset();
      break;
    case Fault::kReset:
      ResetNow(connection.caller);
      ResetNow(connection.target);
      ResetNow(connection.copy);
      break;
    case Fault::kResetCaller:
      connection.silent = true;
      ResetNow(connection.caller);
      break;
    case Fault::kResetTarget:
      connection.silent = true;
      ResetNow(connection.target);
      ResetNow(connection.copy);
      break;
    case Fault::kFinToCaller:
      shutdown(connection.caller.get(), SHUT_WR);
      connection.down.write_end = true;
      break;
    case Fault::kFinToTarget:
      shutdown(connection.target.get(), SHUT_WR);
      connection.up.write_end = true;
      break;
    case Fault::kSilence:
      connection.silent = true;
      break;
  }
}

void TcpProxy::Read(Connection& connection, bool up) {
  Way& way = up ? connection.up : connection.down;
  std::string bytes(kReadBytes, '\0');
  const ssize_t got = read((up ? connection.caller : connection.target).get(), bytes.data(), bytes.size());
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (got < 0) {
    Apply(connection, Fault::kReset);
    return;
  }
  way.read_end = got == 0;
  bytes.resize(static_cast<size_t>(got));
  connection.bytes += got;
  if (way.write_end) {
    return;  // nobody hears it any more
  }
  if (up && connection.copy.get() >= 0 && got > 0) {
    [[maybe_unused]] const ssize_t sent = send(connection.copy.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  way.queued_bytes += got;
  const bool delayed = connection.harm.fault == Fault::kDelay;
  way.queue.push_back({absl::Now() + (delayed ? connection.harm.delay : absl::ZeroDuration()), std::move(bytes)});
}

void TcpProxy::Write(Connection& connection, bool up) {
  Way& way = up ? connection.up : connection.down;
  const int fd = (up ? connection.target : connection.caller).get();
  while (!way.queue.empty() && way.queue.front().due <= absl::Now()) {
    std::string& bytes = way.queue.front().bytes;
    if (bytes.empty() || way.write_end) {
      if (!std::exchange(way.write_end, true)) shutdown(fd, SHUT_WR);
      way.queue.clear();
      way.queued_bytes = 0;
      return;
    }
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    if (sent < 0) {
      Apply(connection, Fault::kReset);
      return;
    }
    way.queued_bytes -= sent;
    bytes.erase(0, static_cast<size_t>(sent));
    if (bytes.empty()) {
      way.queue.pop_front();
    }
  }
}

bool TcpProxy::Ended(const Connection& connection) {
  const bool gone = connection.caller.get() < 0 && connection.target.get() < 0;
  return gone || (!connection.silent && connection.up.read_end && connection.up.write_end && connection.down.read_end &&
                  connection.down.write_end);
}

void TcpProxy::Run() {
  for (;;) {
    std::vector<pollfd> entries = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    int timeout_ms = kPollMs;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) {
        return;
      }
      Accept();
      for (Connection& connection : connections_) {
        if (!connection.harmed && connection.harm.fault != Fault::kNone &&
            connection.bytes >= connection.harm.after_bytes) {
          Apply(connection, connection.harm.fault);
        }
        for (const bool up : {true, false}) {
          Way& way = up ? connection.up : connection.down;
          if (connection.silent || connection.caller.get() < 0) break;
          if (!way.read_end && way.queued_bytes < kMaxQueuedBytes) {
            Read(connection, up);
          }
          if (connection.caller.get() >= 0) {
            Write(connection, up);
          }
          const int from = (up ? connection.caller : connection.target).get();
          const int to = (up ? connection.target : connection.caller).get();
          if (!way.read_end && way.queued_bytes < kMaxQueuedBytes) {
            entries.push_back({from, POLLIN, 0});
          }
          if (!way.queue.empty()) {
            if (way.queue.front().due <= absl::Now()) {
              entries.push_back({to, POLLOUT, 0});
            } else {
              timeout_ms = 1;
            }
          }
        }
        if (connection.copy.get() >= 0) {  // its answers
          char bytes[4096];
          while (read(connection.copy.get(), bytes, sizeof(bytes)) > 0) {
          }
        }
      }
      connections_.remove_if(Ended);
    }
    poll(entries.data(), entries.size(), timeout_ms);
    eventfd_t count;
    eventfd_read(wake_.get(), &count);
  }
}

}  // namespace shardd::testing
