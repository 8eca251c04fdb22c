#include "server/metrics/http/listening.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<Listening>> Listening::Start(const MetricsAddress& address, const TlsFiles& tls,
                                                            HttpServer::Handlers handlers, const FrontLimits& limits) {
  std::unique_ptr<Listening> listening(new Listening());
  if (address.path.empty() && tls.certificate.empty()) {
    SHARDD_ASSIGN_OR_RETURN(listening->server_, HttpServer::Start(address, std::move(handlers)));
    listening->url_ = absl::StrCat("http://", address.host, ":", listening->port(), "/metrics");
    return listening;
  }
  SHARDD_ASSIGN_OR_RETURN(listening->front_, Front::Listen(address, tls, limits));
  MetricsAddress inner;
  inner.host = "127.0.0.1";
  SHARDD_ASSIGN_OR_RETURN(listening->server_,
                          HttpServer::Start(inner, std::move(handlers),
                                            [front = listening->front_.get()](const std::string& address, int port) {
                                              return address == "127.0.0.1" && front->Owns(port);
                                            }));
  listening->front_->Serve(listening->server_->port());
  listening->url_ = address.path.empty() ? absl::StrCat("https://", address.host, ":", listening->port(), "/metrics")
                                         : absl::StrCat("unix:", address.path, ":/metrics");
  return listening;
}

}  // namespace shardd
