#include "server/metrics/viewer.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "server/metrics/http/socket_table.h"

namespace shardd {
namespace {

constexpr char kEstablished[] = "01";
// What a uid is shown as that this user namespace does not have; it is somebody else each time.
constexpr uint32_t kOverflowUid = 65534;

// "0100007F:24F8": as the kernel writes it, the address as a number of this machine.
std::string Endpoint(in_addr address, int port) { return absl::StrFormat("%08X:%04X", address.s_addr, port); }
std::string MappedEndpoint(in_addr address, int port) {
  return absl::StrFormat("%08X%08X%08X%s", 0u, 0u, htonl(0xffff), Endpoint(address, port));
}

// False: sockets of different users match.
bool AddOwners(absl::string_view table, const std::string& client, int server_port, std::optional<uint32_t>* owner) {
  const std::string port = absl::StrFormat(":%04X", server_port);
  for (const absl::string_view line : absl::StrSplit(table, '\n')) {
    // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipWhitespace());
    if (words.size() < 10 || words[1] != client || !absl::EndsWith(words[2], port)) continue;
    uint32_t uid = 0;
    // A socket that no process has any more is said to be root's.
    if (words[3] != kEstablished || words[9] == "0" || !absl::SimpleAtoi(words[7], &uid)) return false;
    if (owner->has_value() && *owner != uid) return false;
    *owner = uid;
  }
  return true;
}

}  // namespace

bool IsAddress(absl::string_view host) {
  in_addr parsed{};
  const std::string name(host.substr(0, host.find(':')));
  return name == "localhost" || inet_pton(AF_INET, name.c_str(), &parsed) == 1;
}

std::optional<uint32_t> OwnerOfSocket(absl::string_view tcp, absl::string_view tcp6, absl::string_view client_address,
                                      int client_port, int server_port) {
  in_addr address{};
  if (inet_pton(AF_INET, std::string(client_address).c_str(), &address) != 1) return std::nullopt;
  std::optional<uint32_t> owner;
  if (!AddOwners(tcp, Endpoint(address, client_port), server_port, &owner) ||
      !AddOwners(tcp6, MappedEndpoint(address, client_port), server_port, &owner)) {
    return std::nullopt;
  }
  return owner;
}

Viewer ViewerOf(const HttpRequest& request, PagePolicy policy, PageReach reach) {
  Viewer viewer;
  if ((policy == PagePolicy::kOwn || reach == PageReach::kLoopback) && !IsAddress(request.host)) {
    viewer.why = absl::StrCat("jobs are shown under an address or localhost alone (got the host \"", request.host,
                              "\"), so that no other site's script asks for them");
    return viewer;
  }
  if (policy == PagePolicy::kAll) {
    viewer.sees_all = true;
    viewer.why = "--status_page=all: whoever reaches this port sees all jobs";
    return viewer;
  }
  if (reach == PageReach::kFront) {
    viewer.why =
        "behind TLS or a Unix socket it is not known whose browser asks; --status_page=all shows all jobs to whoever "
        "may connect there";
    return viewer;
  }
  const SocketTables tables = ConnectionsBetween(request.client_port, request.server_port);
  const std::optional<uint32_t> uid =
      OwnerOfSocket(tables.tcp, tables.tcp6, request.client_address, request.client_port, request.server_port);
  if (!uid.has_value() || *uid == kOverflowUid) {
    viewer.why = absl::StrCat("this machine does not know which user connects from ", request.client_address,
                              "; --status_page=all shows all jobs to whoever reaches this port");
    return viewer;
  }
  viewer.sees_all = *uid == 0 || *uid == geteuid();
  viewer.uid = uid;
  viewer.why = absl::StrCat("this browser runs as uid ", *uid);
  return viewer;
}

}  // namespace shardd
