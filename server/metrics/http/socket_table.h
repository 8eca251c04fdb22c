#ifndef SHARDD_SERVER_METRICS_HTTP_SOCKET_TABLE_H_
#define SHARDD_SERVER_METRICS_HTTP_SOCKET_TABLE_H_

#include <string>

namespace shardd {

// Lines of /proc/self/net/tcp and tcp6.
struct SocketTables {
  std::string tcp;
  std::string tcp6;
};
// Those of connections from this port to that one, of this network namespace. The kernel is asked for them alone
// (sock_diag), because a machine that answers many requests has a hundred thousand other lines, of connections that are
// over, and a second is gone before they are read; where it is not to be asked, they are read.
SocketTables ConnectionsBetween(int client_port, int server_port);
// The same, read. For tests, too.
SocketTables ReadConnectionsBetween(int client_port, int server_port);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_SOCKET_TABLE_H_
