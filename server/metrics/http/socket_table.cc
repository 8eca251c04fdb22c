#include "server/metrics/http/socket_table.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <fstream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/shm/unique_fd.h"

namespace shardd {
namespace {

constexpr timeval kAnswerLimit = {1, 0};
constexpr uint32_t kAllStates = ~0u;

std::string ReadLines(const char* path, int client_port, int server_port) {
  const std::string from = absl::StrFormat(":%04X ", client_port), to = absl::StrFormat(":%04X ", server_port);
  std::string lines, line;
  for (std::ifstream text(path); std::getline(text, line);) {
    if (absl::StrContains(line, from) && absl::StrContains(line, to)) absl::StrAppend(&lines, line, "\n");
  }
  return lines;
}

std::string Endpoint(int family, const uint32_t* address, uint16_t port) {
  std::string text;
  for (int word = 0; word < (family == AF_INET6 ? 4 : 1); ++word) absl::StrAppendFormat(&text, "%08X", address[word]);
  return absl::StrCat(text, absl::StrFormat(":%04X", ntohs(port)));
}

// As the kernel writes it there.
std::string LineOf(const inet_diag_msg& of) {
  return absl::StrFormat(
      "0: %s %s %02X 0:0 0:0 0 %u 0 %u\n", Endpoint(of.idiag_family, of.id.idiag_src, of.id.idiag_sport),
      Endpoint(of.idiag_family, of.id.idiag_dst, of.id.idiag_dport), of.idiag_state, of.idiag_uid, of.idiag_inode);
}

// Nothing: the kernel does not say.
std::optional<std::string> AskLines(int family, int client_port, int server_port) {
  const UniqueFd netlink(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink.valid()) return std::nullopt;
  setsockopt(netlink.get(), SOL_SOCKET, SO_RCVTIMEO, &kAnswerLimit, sizeof(kAnswerLimit));
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } message{};
  message.header = {sizeof(message), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0};
  message.request.sdiag_family = static_cast<uint8_t>(family);
  message.request.sdiag_protocol = IPPROTO_TCP;
  message.request.idiag_states = kAllStates;
  message.request.id.idiag_sport = htons(static_cast<uint16_t>(client_port));
  message.request.id.idiag_dport = htons(static_cast<uint16_t>(server_port));
  if (send(netlink.get(), &message, sizeof(message), 0) != sizeof(message)) return std::nullopt;
  std::string lines;
  alignas(nlmsghdr) std::array<char, 32 << 10> bytes;
  for (;;) {
    const ssize_t size = recv(netlink.get(), bytes.data(), bytes.size(), 0);
    if (size <= 0) return std::nullopt;
    auto left = static_cast<size_t>(size);
    for (auto* each = reinterpret_cast<nlmsghdr*>(bytes.data()); NLMSG_OK(each, left); each = NLMSG_NEXT(each, left)) {
      if (each->nlmsg_type == NLMSG_DONE) return lines;
      if (each->nlmsg_type != SOCK_DIAG_BY_FAMILY || each->nlmsg_len < NLMSG_LENGTH(sizeof(inet_diag_msg))) {
        return std::nullopt;
      }
      lines += LineOf(*static_cast<const inet_diag_msg*>(NLMSG_DATA(each)));
    }
  }
}

}  // namespace

SocketTables ReadConnectionsBetween(int client_port, int server_port) {
  return {ReadLines("/proc/self/net/tcp", client_port, server_port),
          ReadLines("/proc/self/net/tcp6", client_port, server_port)};
}

SocketTables ConnectionsBetween(int client_port, int server_port) {
  std::optional<std::string> tcp = AskLines(AF_INET, client_port, server_port);
  std::optional<std::string> tcp6 = AskLines(AF_INET6, client_port, server_port);
  if (!tcp.has_value() || !tcp6.has_value()) return ReadConnectionsBetween(client_port, server_port);
  return {*std::move(tcp), *std::move(tcp6)};
}

}  // namespace shardd
