#include "client/c/daemon/connect.h"

#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/c/daemon/autostart.h"
#include "client/c/daemon/unary_call.h"
#include "client/c/gpu/trainer_sums.h"
#include "common/cuda/driver.h"
#include "common/process/daemon_address.h"
#include "common/shm/fd_channel.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "common/version.h"
#include "common/versions/versions.h"
#include "grpcpp/create_channel_posix.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {
namespace {

// gRPC's own, and what the daemon sends: gRPC ends the process where it gets none.
constexpr int64_t kDescriptorsOfASession = 32;
// A module tree with a million parameters is some 100 MiB.
constexpr int kMaxMessageBytes = 256 << 20;
// connect() on a Unix socket blocks while the listener's backlog is full.
constexpr absl::Duration kConnectTimeout = absl::Seconds(10);

std::string HexPrefix(absl::string_view digest) { return absl::BytesToHexString(digest.substr(0, 6)); }

}  // namespace

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, const Interrupt& interrupt) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("connect \"", path, "\": no socket (", strerror(errno), ")"));
  }
  const timeval slice = absl::ToTimeval(Interrupt::kSlice);
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof(slice));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("connect \"", path, "\": path is too long (got ", path.size(),
                                                   " characters, want at most ", sizeof(address.sun_path) - 1, ")"));
  }
  memcpy(address.sun_path, path.data(), path.size());
  const Deadline deadline = Deadline::In(kConnectTimeout);
  int error = 0;
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    error = errno;
    if (error != EINTR && (error != EAGAIN || deadline.HasPassed())) {
      break;
    }
    error = 0;
    SHARDD_RETURN_IF_ERROR(interrupt.Check("connect"));
  }
  if (error != 0) {
    if (error == EACCES || error == EPERM) {
      return absl::PermissionDeniedError(
          absl::StrCat("connect \"", path, "\": this user may not (", strerror(error),
                       "); be its owner or a member of the socket's group, or unset SHARDD_ADDRESS"));
    }
    return absl::UnavailableError(absl::StrCat("connect \"", path, "\": no daemon there (", strerror(error),
                                               "); start one with `shardd --listen=unix:", path,
                                               "`, or unset SHARDD_ADDRESS to have one started"));
  }
  const timeval forever = {0, 0};
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof(forever));
  return fd;
}

namespace {

bool HasGpu() {
  const absl::StatusOr<CudaDriver> driver = CudaDriver::Load();
  return driver.ok() && driver->CountDevices().value_or(0) > 0;
}

}  // namespace

absl::StatusOr<Target> GivenTarget(absl::string_view given) {
  Target target;
  const std::string address = DaemonAddress(given);
  target.socket_path = kSystemSocket;
  if (!address.empty()) {
    SHARDD_ASSIGN_OR_RETURN(target.socket_path, ParseUnixAddress(address));
  }
  target.address = absl::StrCat("unix:", target.socket_path);
  return target;
}

absl::StatusOr<Target> ResolveTarget(absl::string_view given, int local_world, bool device_memory, Deadline deadline,
                                     const Interrupt& interrupt) {
  Target target;
  const std::string address = DaemonAddress(given);
  if (!address.empty()) {
    SHARDD_ASSIGN_OR_RETURN(target.socket_path, ParseUnixAddress(address));
  } else {
    target.found_here = true;
    const absl::Status system = ConnectUnix(kSystemSocket, interrupt).status();
    if (absl::IsCancelled(system)) {
      return system;
    }
    if (system.ok()) {
      target.socket_path = kSystemSocket;
    } else {
      AutostartOptions options;
      options.devices = local_world;
      options.gpus = device_memory && HasGpu();
      options.deadline = deadline;
      options.interrupt = &interrupt;
      SHARDD_ASSIGN_OR_RETURN(target.socket_path, FindOrStartDaemon(options));
      target.own = true;
      target.on_gpus = !absl::EndsWith(target.socket_path, "/shardd.sock");  // also where GPUs are not served after all
    }
  }
  target.address = absl::StrCat("unix:", target.socket_path);
  return target;
}

absl::Status StartAgain(const Target& target, int local_world, Deadline deadline, const Interrupt& interrupt) {
  AutostartOptions options;
  options.devices = local_world;
  options.gpus = target.on_gpus;
  options.deadline = deadline;
  options.interrupt = &interrupt;
  SHARDD_ASSIGN_OR_RETURN(const std::string path, FindOrStartDaemon(options));
  return path == target.socket_path ? absl::OkStatus()
                                    : absl::FailedPreconditionError(absl::StrCat(
                                          "start daemon: this user's folder is another one by now (got ", path,
                                          ", want ", target.socket_path, "); leave XDG_RUNTIME_DIR as it was"));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const Target& target, const Interrupt& interrupt) {
  SHARDD_ASSIGN_OR_RETURN(UniqueFd fd, ConnectUnix(target.socket_path, interrupt));
  if (const OpenFiles files = CountOpenFiles(); files.left() < kDescriptorsOfASession) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "connect \"", target.socket_path, "\": this program may open too few more files (got ", files.left(), " of ",
        files.limit, ", want ", kDescriptorsOfASession, "); raise its limit of open files (ulimit -n)"));
  }
  if (fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) {
    return absl::InternalError(absl::StrCat("connect \"", target.socket_path, "\": ", strerror(errno)));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  return grpc::CreateCustomInsecureChannelFromFd("shardd", fd.release(), arguments);
}

absl::StatusOr<v1::OpenJobResponse> OpenJob(const std::shared_ptr<grpc::Channel>& channel, v1::OpenJobRequest request,
                                            const std::string& job_secret, Deadline deadline,
                                            const Interrupt& interrupt) {
  auto stub = v1::TrainerService::NewStub(channel);
  request.set_protocol_version(kProtocolVersions.oldest);
  request.set_newest_protocol_version(kProtocolVersions.newest);
  request.set_adds_gradients(request.device_memory() && CanAddGradients());
  v1::OpenJobResponse response;
  SHARDD_RETURN_IF_ERROR(UnaryCall("attach", stub.get(), &v1::TrainerService::Stub::AsyncOpenJob, request, deadline,
                                   interrupt, &response, job_secret));
  if (response.protocol_version() == 0) {
    response.set_protocol_version(request.protocol_version());
  }
  if (!kProtocolVersions.Has(response.protocol_version())) {
    return absl::InternalError(absl::StrCat("open job \"", request.spec().name(),
                                            "\": the daemon speaks a protocol version that was not offered (got ",
                                            response.protocol_version(), ", want ", kProtocolVersions.Text(), ")"));
  }
  return response;
}

absl::Status CheckPlannedAlike(const std::string& job, const std::string& theirs, const std::string& ours) {
  if (theirs == ours) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "open job \"", job, "\": the daemon plans it differently (got digest ", HexPrefix(theirs), "..., want ",
      HexPrefix(ours), "...); use client and daemon of one version (this is ", kVersion, ")"));
}

absl::StatusOr<v1::AttachRankResponse> AttachRank(const std::shared_ptr<grpc::Channel>& channel,
                                                  const v1::AttachRankRequest& request, const std::string& job_secret,
                                                  Deadline deadline, const Interrupt& interrupt) {
  auto stub = v1::TrainerService::NewStub(channel);
  v1::AttachRankResponse response;
  SHARDD_RETURN_IF_ERROR(UnaryCall("attach", stub.get(), &v1::TrainerService::Stub::AsyncAttachRank, request, deadline,
                                   interrupt, &response, job_secret));
  return response;
}

}  // namespace shardd
