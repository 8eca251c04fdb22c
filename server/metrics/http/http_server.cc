#include "server/metrics/http/http_server.h"

#include <civetweb.h>

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

constexpr std::pair<const char*, const char*> kSecurity[] = {
    {"X-Content-Type-Options", "nosniff"},
    {"Content-Security-Policy",
     "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
    {"Cross-Origin-Opener-Policy", "same-origin"},
    {"Referrer-Policy", "no-referrer"}};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const MetricsAddress& address, Handlers handlers, std::function<bool(const std::string& address, int port)> admit) {
  mg_init_library(MG_FEATURES_DEFAULT);
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(handlers), std::move(admit)));
  const std::string at = absl::StrCat(address.host, ":", address.port);
  // No files are served: there is no document_root. A client that sends or reads slowly has its thread for so long, and
  // so has a connection that a browser opens ahead. None is kept open behind an answer: each open page would have one.
  const char* options[] = {"listening_ports",
                           at.c_str(),
                           "num_threads",
                           "16",
                           "request_timeout_ms",
                           "5000",
                           "enable_keep_alive",
                           "no",
                           "max_request_size",
                           "8192",
                           "enable_auth_domain_check",
                           "no",
                           nullptr};
  mg_callbacks callbacks{};
  mg_init_data init{};
  init.callbacks = &callbacks;
  init.user_data = server.get();
  init.configuration_options = options;
  char text[256] = "";
  mg_error_data error{};
  error.text = text;
  error.text_buffer_size = sizeof(text);
  server->context_ = mg_start2(&init, &error);
  if (server->context_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("listen on ", at, ": ", text));
  }
  mg_set_request_handler(server->context_, "**", &HttpServer::Serve, server.get());
  mg_server_port port{};
  if (mg_get_server_ports(server->context_, 1, &port) == 1) server->port_ = port.port;
  return server;
}

std::string HttpRequest::Parameter(const std::string& name) const {
  char value[1025];
  const int length = mg_get_var(query.data(), query.size(), name.c_str(), value, sizeof(value));
  return length > 0 ? std::string(value, static_cast<size_t>(length)) : "";
}

HttpServer::~HttpServer() {
  if (context_ != nullptr) mg_stop(context_);
  mg_exit_library();
}

int HttpServer::Serve(mg_connection* connection, void* server) {
  const mg_request_info& info = *mg_get_request_info(connection);
  const std::string_view method = info.request_method;
  HttpRequest request;
  request.path = info.local_uri;
  request.query = info.query_string == nullptr ? "" : info.query_string;
  const char* const host = mg_get_header(connection, "Host");
  request.host = host == nullptr ? "" : host;
  request.client_address = info.remote_addr;
  request.client_port = info.remote_port;
  request.server_port = static_cast<HttpServer*>(server)->port_;
  const Handlers& handlers = static_cast<HttpServer*>(server)->handlers_;
  const auto handler = handlers.find(request.path);
  HttpResponse response;
  const auto& admit = static_cast<HttpServer*>(server)->admit_;
  if (admit != nullptr && !admit(info.remote_addr, info.remote_port)) {
    response = {403, "text/plain; charset=utf-8", "this port is for shardd-metrics itself\n"};
  } else if (method != "GET" && method != "HEAD") {
    response = {405, "text/plain; charset=utf-8", "only GET and HEAD\n"};
  } else if (handler == handlers.end()) {
    response = {404, "text/plain; charset=utf-8",
                "there is no such page; metrics are at /metrics, a page for people is at /\n"};
  } else {
    response = handler->second(request);
  }
  mg_response_header_start(connection, response.status);
  mg_response_header_add(connection, "Content-Type", response.content_type.c_str(), -1);
  mg_response_header_add(connection, "Content-Length", absl::StrCat(response.body.size()).c_str(), -1);
  mg_response_header_add(connection, "Cache-Control", "no-store", -1);
  for (const auto& [name, value] : kSecurity) mg_response_header_add(connection, name, value, -1);
  mg_response_header_send(connection);
  if (method != "HEAD") mg_write(connection, response.body.data(), response.body.size());
  return response.status;
}

}  // namespace shardd
