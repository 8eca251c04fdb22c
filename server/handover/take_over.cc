#include "server/handover/take_over.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "common/status/grpc_status.h"
#include "common/version.h"
#include "common/versions/versions.h"
#include "grpcpp/grpcpp.h"
#include "server/observe/log.h"
#include "server/storage/kept_formats.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd {
namespace {

constexpr absl::Duration kConnect = absl::Seconds(30);  // it is busy
// The daemon waits for its jobs' running steps (--finish_step_ms).
constexpr absl::Duration kHandOver = absl::Minutes(5);

bool SomebodyListens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  path.copy(address.sun_path, path.size());
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // EAGAIN: as many wait for it as may.
  return connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno == EAGAIN;
}

}  // namespace

absl::Status TakeOver(const std::string& path) {
  if (!SomebodyListens(path)) {
    LogInfo(absl::StrCat("take over: no daemon listens on ", path, "; this one starts as the first"));
    return absl::OkStatus();
  }
  const auto channel = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
  if (!channel->WaitForConnected(absl::ToChronoTime(absl::Now() + kConnect))) {
    return absl::UnavailableError(absl::StrCat("take over from the daemon on ", path, ": it has not answered within ",
                                               absl::FormatDuration(kConnect)));
  }
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kHandOver));
  v1::HandOverRequest request;
  request.set_version(kVersion);
  *request.mutable_oldest() = KeptFormatsOf(kCustodyFormats.oldest, kJournalFormats.oldest, kTakeUpFormats.oldest);
  *request.mutable_newest() = KeptFormatsOf(kCustodyFormats.newest, kJournalFormats.newest, kTakeUpFormats.newest);
  v1::HandOverResponse response;
  const absl::Status status = FromGrpcStatus(v1::JobsService::NewStub(channel)->HandOver(&context, request, &response));
  if (absl::IsUnavailable(status)) {
    // The custodian gives what it keeps to nobody before its owner has ended.
    LogWarning(absl::StrCat("take over: the daemon on ", path, " has ended without handing over: ", status.message()));
    return absl::OkStatus();
  }
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat("take over from the daemon on ", path, ": ", status.message()));
  }
  LogInfo(absl::StrCat("takes over from the daemon on ", path, " (pid ", response.pid(), ")"));
  return absl::OkStatus();
}

}  // namespace shardd
