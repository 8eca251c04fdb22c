#include "server/peer/bound_sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/peer/link_credentials.h"

namespace shardd {
namespace {

constexpr int kBacklog = 512;

// Adds a socket for `address`, with the port of those before it. Returns errno; 0: it listens.
int BindOne(sockaddr_storage address, socklen_t size, BoundSockets* bound) {
  UniqueFd socket(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) {
    return errno;
  }
  const int yes = 1;
  const int no = 0;
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  in_port_t& port = address.ss_family == AF_INET6 ? v6.sin6_port : v4.sin_port;
  if (bound->port != 0) {
    port = htons(static_cast<uint16_t>(bound->port));
  }
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      (address.ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr) &&
       ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) != 0) ||
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(socket.get(), kBacklog) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return errno;
  }
  bound->port = ntohs(port);
  bound->sockets.push_back(std::move(socket));
  return 0;
}

}  // namespace

absl::StatusOr<BoundSockets> BindAll(const std::string& listen) {
  const std::string host(HostOf(listen));
  const std::string port = listen.substr(listen.rfind(':') + 1);
  BoundSockets bound;
  std::string why;
  // IPv6's serves IPv4 too. A machine without IPv6 has the other alone.
  const bool any = host == "0.0.0.0" || host == "::";
  for (const std::string& name : any ? std::vector<std::string>{"::", "0.0.0.0"} : std::vector<std::string>{host}) {
    addrinfo hints = {};
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int code =
        any && !bound.sockets.empty() ? EAI_NONAME : ::getaddrinfo(name.c_str(), port.c_str(), &hints, &found);
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found, &freeaddrinfo);
    if (code != 0 && bound.sockets.empty()) {
      why = gai_strerror(code);
    }
    for (const addrinfo* one = found; code == 0 && one != nullptr; one = one->ai_next) {
      sockaddr_storage address = {};
      std::memcpy(&address, one->ai_addr, one->ai_addrlen);
      if (const int error = BindOne(address, one->ai_addrlen, &bound); error != 0) {
        why = std::strerror(error);
      }
    }
  }
  if (bound.sockets.empty()) {
    return absl::UnavailableError(absl::StrCat("listen for other nodes on \"", listen, "\": ", why));
  }
  return bound;
}

}  // namespace shardd
