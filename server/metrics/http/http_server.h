#ifndef SHARDD_SERVER_METRICS_HTTP_HTTP_SERVER_H_
#define SHARDD_SERVER_METRICS_HTTP_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/http/listen_address.h"

struct mg_connection;
struct mg_context;

namespace shardd {

struct HttpRequest {
  std::string path;   // "/metrics", without the query
  std::string query;  // "job=gpt"; empty: there is none
  std::string host;   // the header's: "127.0.0.1:9464"; empty: there is none
  // Of the connection: who asks, and which port he asks.
  std::string client_address;  // "127.0.0.1"
  int client_port = 0;
  int server_port = 0;
  // The value of `name` in the query, decoded; empty: it is not there, or longer than 1 KiB.
  std::string Parameter(const std::string& name) const;
};
// Every answer forbids a browser to keep it, to guess its type, to show it within another site's page, and, where it is
// a page, to load anything from elsewhere or to run scripts that are not files of this server.
struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// What is read over HTTP: GET and HEAD of whole paths, each with a handler, and nothing else (404, 405). Owns the port
// and its threads, civetweb's. Thread-safe.
class HttpServer {
 public:
  // By path. Called by several threads at a time; may block.
  using Handlers = std::map<std::string, std::function<HttpResponse(const HttpRequest&)>, std::less<>>;
  // Serves when it returns: who comes from an address and port that `admit` takes, where it is given (others: 403).
  // UNAVAILABLE: the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const MetricsAddress& address, Handlers handlers,
      std::function<bool(const std::string& address, int port)> admit = nullptr);
  // Blocks until handlers have returned.
  ~HttpServer();

  int port() const { return port_; }

 private:
  HttpServer(Handlers handlers, std::function<bool(const std::string& address, int port)> admit)
      : handlers_(std::move(handlers)), admit_(std::move(admit)) {}
  static int Serve(mg_connection* connection, void* server);

  const Handlers handlers_;
  const std::function<bool(const std::string& address, int port)> admit_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_HTTP_SERVER_H_
