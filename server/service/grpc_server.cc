#include "server/service/grpc_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/resource_quota.h"
#include "server/observe/log.h"
#include "server/service/reflection_service.h"

namespace shardd {
namespace {

// Shortest interval of pings on an idle connection; gRPC's default of 5 minutes would answer with GOAWAY.
constexpr int kMinPingIntervalMs = 10'000;

// Writes the libraries' lines to our log and limits them like ours, gRPC's and protobuf's as one place each. Among them
// are protobuf's complaints about clients' texts that are not UTF-8.
void LogLinesOfLibraries() {
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel level, const char*, int, const std::string& message) {
    const LogLevel ours = level == google::protobuf::LOGLEVEL_INFO      ? LogLevel::kDebug
                          : level == google::protobuf::LOGLEVEL_WARNING ? LogLevel::kWarning
                                                                        : LogLevel::kError;
    Log(ours, absl::StrCat("protobuf: ", message));
  });
  gpr_set_log_function([](gpr_log_func_args* args) {
    const LogLevel ours = args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kError : LogLevel::kDebug;
    Log(ours, absl::StrCat("gRPC: ", args->message));
  });
}

void InstallPluginsOnce() {
  static const bool installed = [] {
    LogLinesOfLibraries();
    // For the life of the process. Otherwise the last user of the library joins its threads, and the thread for
    // unpolled sockets sits in epoll for ten seconds after an answer that its reader took slowly.
    grpc_init();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::channelz::experimental::InitChannelzService();
    return true;
  }();
  (void)installed;
}

// Removes channelz from a builder: linking it is enough for the library to add it.
class WithoutChannelz final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
      return plugin->name() == "channelz_service";
    });
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Create(std::vector<NamedService> services,
                                                               const GrpcServerOptions& options) {
  InstallPluginsOnce();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.SetResourceQuota(grpc::ResourceQuota("shardd").Resize(options.max_buffer_bytes));
  if (!options.channelz) {
    builder.SetOption(std::make_unique<WithoutChannelz>());
  }
  if (options.reflection != nullptr) {
    std::vector<std::string> names;
    for (const NamedService& named : services) names.push_back(named.name);
    const std::string own = grpc::reflection::v1alpha::ServerReflection::service_full_name();
    names.insert(names.end(), {"grpc.health.v1.Health", own});
    if (options.channelz) names.emplace_back("grpc.channelz.v1.Channelz");
    services.push_back({own, std::make_unique<ReflectionService>(std::move(names), options.reflection)});
  }
  for (const NamedService& named : services) {
    builder.RegisterService(named.service.get());
  }
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::InternalError("start gRPC server: the library refused (its reason is on standard error)");
  }
  auto created = std::unique_ptr<GrpcServer>(new GrpcServer(std::move(services), std::move(server)));
  created->SetServing(true);
  return created;
}

GrpcServer::GrpcServer(std::vector<NamedService> services, std::unique_ptr<grpc::Server> server)
    : services_(std::move(services)), server_(std::move(server)) {}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  if (health == nullptr) {
    return;
  }
  health->SetServingStatus("", serving);
  for (const NamedService& named : services_) {
    health->SetServingStatus(named.name, serving);
  }
}

void GrpcServer::Shutdown(absl::Duration grace) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(shut_down_, true)) {
      return;
    }
  }
  if (grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService(); health != nullptr) {
    // NOT_SERVING for all, for good: callers of Watch learn it before their streams end.
    health->Shutdown();
  }
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
}

}  // namespace shardd
