#ifndef SHARDD_SERVER_METRICS_VIEWER_H_
#define SHARDD_SERVER_METRICS_VIEWER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "server/metrics/http/http_server.h"
#include "server/metrics/page_policy.h"

namespace shardd {

// Who looks at the page, and so what of the daemon's answers he may see. Nobody sees more than this process does.
struct Viewer {
  bool sees_all = false;
  std::optional<uint32_t> uid;  // jobs of this user; neither this nor sees_all: no job
  std::string why;              // in words, for people
  bool Sees(uint32_t owner, bool has_secret) const { return sees_all || (uid == owner && !has_secret); }
};

// A browser has no uid, its connection has: the kernel says whose socket the other end is, if it is of this machine (of
// this network namespace). kOwn: root and this process's user see all jobs, another user sees its own without a secret,
// a connection from elsewhere none. Behind a Front nobody is known.
//
// Where the request names a host that is no address, nobody is seen as anybody, but with kAll on a port that others
// reach: a site whose name leads to this machine could otherwise have the user's browser ask in its place.
Viewer ViewerOf(const HttpRequest& request, PagePolicy policy, PageReach reach);

// "127.0.0.1:9464", "localhost": a Host header that no other site's name leads to. Pure.
bool IsAddress(absl::string_view host);

// The owner of the socket at `client_address`:`client_port` (IPv4) that is connected to `server_port`, out of the text
// of /proc/self/net/tcp and tcp6. Nothing: there is no such socket, it is closed already, or there are several of
// different users. Pure.
std::optional<uint32_t> OwnerOfSocket(absl::string_view tcp, absl::string_view tcp6, absl::string_view client_address,
                                      int client_port, int server_port);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_VIEWER_H_
