#include "tests/testing/http_get.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shm/unique_fd.h"

namespace shardd::testing {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

int FreePort() {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  const UniqueFd bound(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool found = bind(bound.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                     getsockname(bound.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
  return found ? ntohs(address.sin_port) : 0;
}

HttpAnswer HttpGet(int port, const std::string& target, const std::string& method, bool keep_alive) {
  const sockaddr_in address = Loopback(port);
  const UniqueFd dialled(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit = {keep_alive ? 4 : 10, 0};
  setsockopt(dialled.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  if (connect(dialled.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return {};
  const std::string request =
      absl::StrCat(method, " ", target,
                   " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: ", keep_alive ? "keep-alive" : "close", "\r\n\r\n");
  if (send(dialled.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return {};
  std::string all;
  char bytes[1 << 16];
  ssize_t n = 0;
  while ((n = recv(dialled.get(), bytes, sizeof(bytes), 0)) > 0) all.append(bytes, n);
  const size_t end = all.find("\r\n\r\n");
  if (end == std::string::npos || !absl::StartsWith(all, "HTTP/1.1 ")) return {};
  return {std::atoi(all.c_str() + 9), all.substr(0, end), all.substr(end + 4), n == 0};
}

}  // namespace shardd::testing
