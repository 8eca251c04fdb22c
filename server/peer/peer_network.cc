#include "server/peer/peer_network.h"

#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "common/status/status_macros.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "server/observe/log.h"
#include "server/peer/bound_sockets.h"
#include "server/peer/connecting_channels.h"
#include "server/peer/link_credentials.h"
#include "server/peer/link_loop.h"
#include "server/peer/peer_port.h"
#include "server/peer/peer_service.h"
#include "server/peer/peer_wire.h"

namespace shardd {
namespace {

constexpr size_t kMaxBufferBytes = size_t{2} << 30;  // of all connections, for messages being received
constexpr int kMaxStreams = 4;                       // per connection; ours carry one each
constexpr int kServerHandshakeMs = 10'000;           // of TLS and of HTTP/2's first frames
constexpr int kIdleMs = 60'000;                      // of a connection without a stream
constexpr int kMinPingIntervalMs = 500;
constexpr int kConnectPatienceMs = 5'000;
constexpr int kFrameBytes = 1 << 20;
constexpr int kWindowBytes = 4 << 20;

void SetKeepalive(int keepalive_ms, const std::function<void(const char*, int)>& set) {
  set(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
}

class JoinedLinks final : public PeerLinks {
 public:
  JoinedLinks(std::shared_ptr<LinkLoop> loop, std::shared_ptr<PeerService> service)
      : loop_(std::move(loop)), service_(std::move(service)) {}
  ~JoinedLinks() override {
    service_->Remove(loop_->join());
    loop_->Stop();
  }
  int node() const override { return loop_->join().node; }
  int nodes() const override { return static_cast<int>(loop_->join().addresses.size()); }
  PeerTraffic traffic(int node) const override { return loop_->traffic(node); }
  int protocol_version(int node) const override { return loop_->protocol_version(node); }
  bool takes_writes_where_cut(int node) const override { return loop_->takes_writes_where_cut(node); }
  bool takes_extensions(int node) const override { return loop_->takes_extensions(node); }
  bool takes_fetch_ends(int node) const override { return loop_->takes_fetch_ends(node); }
  void Send(int node, v1::PeerMessage message) override { loop_->Send(node, message); }
  void Renew(int node) override { loop_->Renew(node); }
  void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                std::function<void(absl::Status)> sent) override {
    loop_->SendData(node, header, elements, std::move(sent));
  }

 private:
  const std::shared_ptr<LinkLoop> loop_;
  const std::shared_ptr<PeerService> service_;
};

class GrpcPeerNetwork final : public PeerNetwork {
 public:
  GrpcPeerNetwork(const Options& options, LinkCredentials credentials)
      : options_(options), credentials_(std::move(credentials)), service_(std::make_shared<PeerService>()) {}
  ~GrpcPeerNetwork() override {
    if (entrance_ != nullptr) {
      entrance_->Stop();
    }
    if (server_ != nullptr) {
      server_->Shutdown(absl::ToChronoTime(absl::Now()));  // streams that have not sent hello yet
    }
  }

  absl::Status Listen() {
    SHARDD_ASSIGN_OR_RETURN(entrance_, PeerPort::Listen({.listen = options_.listen,
                                                         .tls = credentials_.tls,
                                                         .strangers = !credentials_.tls && !options_.insecure}));
    if (const std::string problem = credentials_.own_problem(); !problem.empty()) {
      LogWarning(absl::StrCat("other nodes will not hear this one: ", problem));
    }
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxPeerHelloBytes));
    builder.SetMaxSendMessageSize(static_cast<int>(kMaxPeerHelloBytes));
    builder.SetResourceQuota(grpc::ResourceQuota("shardd peers").Resize(kMaxBufferBytes));
    SetKeepalive(options_.keepalive_ms,
                 [&builder](const char* name, int value) { builder.AddChannelArgument(name, value); });
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kServerHandshakeMs);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
    builder.SetOption(WithoutPlugins());
    builder.RegisterService(service_.get());
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials_.server);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("listen for other nodes on \"", options_.listen,
                       "\": gRPC cannot (its reason is on standard error): a certificate or key is none"));
    }
    return entrance_->Serve(acceptor_.get());
  }

  void StopListening() override { entrance_->Stop(); }
  int port() const override { return entrance_->port(); }
  std::string Describe() const override {
    return absl::StrCat(options_.listen, absl::EndsWith(options_.listen, ":0") ? absl::StrCat(" (", port(), ")") : "",
                        credentials_.tls ? ", mutual TLS" : ", without TLS");
  }

  absl::StatusOr<std::unique_ptr<PeerLinks>> Join(const PeerJoin& options, PeerLinks::Events* events) override {
    const std::string job = absl::StrCat("join nodes of job \"", options.job, "\": ");
    if (options.node < 0 || options.node >= static_cast<int>(options.addresses.size())) {
      return absl::InvalidArgumentError(absl::StrCat(job, "no such node (got ", options.node, ", want 0 to ",
                                                     options.addresses.size(), " exclusive)"));
    }
    if (options.spec.size() > static_cast<size_t>(kMaxPeerSpecBytes)) {
      return absl::InvalidArgumentError(absl::StrCat(job, "its description is too large for other nodes (got ",
                                                     options.spec.size(), " bytes, want at most ", kMaxPeerSpecBytes,
                                                     ")"));
    }
    for (const std::string& address : options.addresses) {
      SHARDD_RETURN_IF_ERROR(CheckPeerAddress(absl::StrCat(job, "nodes.addresses"), address));
    }
    std::shared_ptr<LinkLoop> loop =
        service_->Add(options, events,
                      {.make_channel = [this](const std::string& address) { return MakeChannel(address); },
                       .let_go = [this](auto channel) { connecting_.LetGo(std::move(channel)); },
                       .own_problem = credentials_.own_problem,
                       .handshake_patience = options_.handshake_patience});
    if (loop == nullptr) {
      return absl::AlreadyExistsError(
          absl::StrCat(job, "the user has a job of that name with links on this node already"));
    }
    return std::make_unique<JoinedLinks>(std::move(loop), service_);
  }

 private:
  // A separate connection per stream: control messages do not wait behind gradients, nor one job behind another.
  std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) const {
    grpc::ChannelArguments arguments;
    SetKeepalive(options_.keepalive_ms, [&arguments](const char* name, int value) { arguments.SetInt(name, value); });
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectPatienceMs);  // this also limits the time for
                                                                              // connecting
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxPeerHelloBytes));
    arguments.SetMaxSendMessageSize(static_cast<int>(kMaxPeerHelloBytes));
    // With a scheme: an address names a host, never a path or another kind of name.
    return grpc::CreateCustomChannel(absl::StrCat("dns:///", address), credentials_.client, arguments);
  }

  const Options options_;
  const LinkCredentials credentials_;
  ConnectingChannels connecting_;
  const std::shared_ptr<PeerService> service_;  // outlives server_
  std::unique_ptr<PeerPort> entrance_;          // outlives server_, whose last bytes it carries
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::Status PeerNetwork::Check(const Options& options) {
  SHARDD_RETURN_IF_ERROR(MakeLinkCredentials(options).status());
  // The port may be another daemon's still; the address is this host's.
  return BindAll(options.listen.substr(0, options.listen.rfind(':')) + ":0").status();
}

absl::StatusOr<std::unique_ptr<PeerNetwork>> PeerNetwork::Create(const Options& options) {
  SHARDD_ASSIGN_OR_RETURN(LinkCredentials credentials, MakeLinkCredentials(options));
  auto network = std::make_unique<GrpcPeerNetwork>(options, std::move(credentials));
  SHARDD_RETURN_IF_ERROR(network->Listen());
  return network;
}

}  // namespace shardd
