#ifndef SHARDD_SERVER_METRICS_HTTP_LISTENING_H_
#define SHARDD_SERVER_METRICS_HTTP_LISTENING_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/http/front.h"
#include "server/metrics/http/http_server.h"
#include "server/metrics/http/listen_address.h"

namespace shardd {

// The HTTP server at its address: by itself, or behind a Front where there is TLS or a Unix socket. Thread-safe.
class Listening {
 public:
  // Errors of HttpServer::Start and Front::Listen.
  static absl::StatusOr<std::unique_ptr<Listening>> Start(const MetricsAddress& address, const TlsFiles& tls,
                                                          HttpServer::Handlers handlers,
                                                          const FrontLimits& limits = FrontLimits());

  // "http://127.0.0.1:9464/metrics", "https://...", "unix:/run/metrics.sock:/metrics".
  const std::string& url() const { return url_; }
  int port() const { return front_ == nullptr ? server_->port() : front_->port(); }
  // That of the HTTP server, which serves nobody but the front where there is one.
  int inner_port() const { return server_->port(); }

 private:
  Listening() = default;

  std::string url_;
  std::unique_ptr<Front> front_;  // outlives the server, which asks it
  std::unique_ptr<HttpServer> server_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_LISTENING_H_
