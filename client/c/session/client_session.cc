#include "client/c/session/client_session.h"

#include <atomic>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// For a program's stream to end what it has, when its session goes.
constexpr absl::Duration kDrainLimit = absl::Seconds(10);

}  // namespace

ClientSession::ClientSession(const v1::AttachRankResponse& attach, const Options& options)
    : id_(attach.session_id()),
      token_(attach.token()),
      memory_(attach.epoch(), options.rank),
      life_(attach.epoch(), options.rank, *options.interrupt, memory_),
      waits_(life_, memory_, options.timeout),
      ring_(attach.epoch(), waits_, memory_),
      trace_(memory_),
      stream_waits_(life_, memory_, waits_) {}

ClientSession::~ClientSession() {
  if (stream_waits_.idle()) {
    return;
  }
  Close();
  stream_waits_.End(kDrainLimit);
  if (stream_waits_.idle()) {
    return;
  }
  // A stream of the program, or the sums', still names all this: it stays for the rest of the process.
  struct Kept {
    SessionMemory::NamedByStreams memory;
    StreamWaits::Named streams;
  };
  // Its thread asks whether the session is over; that it is so is known by now.
  (void)new Kept{memory_.ReleaseNamedByStreams(), stream_waits_.Release()};
}

absl::StatusOr<std::unique_ptr<ClientSession>> ClientSession::Open(const Target& target,
                                                                   const std::shared_ptr<grpc::Channel>& channel,
                                                                   const v1::AttachRankResponse& attach,
                                                                   const Options& options) {
  std::unique_ptr<ClientSession> self(new ClientSession(attach, options));
  SHARDD_RETURN_IF_ERROR(
      self->life_.Open(channel, self->id_, self->token_, options.deadline, attach.outlives_daemon()));
  const auto fetch = [&](FdRange range) -> absl::StatusOr<std::vector<UniqueFd>> {
    auto fds = FetchSessionFds(
        target.socket_path, self->id_, self->token_, options.deadline.Left(),
        [&] { return options.interrupt->Raised(); }, range, options.protocol_version);
    if (Interrupt::Ended(fds.status())) return Interrupt::Cancelled("attach");
    if (!fds.ok()) {
      return self->life_.Explain(fds.status());  // the session may have been ended meanwhile; that says more
    }
    return fds;
  };
  SHARDD_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, fetch({}));
  if (fds.size() != kSessionFdCount) {
    return absl::InternalError(
        absl::StrCat("attach: wrong number of descriptors (got ", fds.size(), ", want ", int{kSessionFdCount}, ")"));
  }
  SHARDD_RETURN_IF_ERROR(self->ShareWords(fds, target, attach, options));
  SHARDD_RETURN_IF_ERROR(self->memory_.MapSlabs(std::move(fds), attach, *options.plan, fetch));
  const auto laid_out = static_cast<int>(self->memory_.page().protocol_version);
  if (laid_out != options.protocol_version && laid_out != 0) {
    return absl::InternalError(absl::StrCat("attach: the session's page is of another protocol version (got ", laid_out,
                                            ", want ", options.protocol_version, ")"));
  }
  if (options.plan->config.trainer_sums()) {
    SHARDD_RETURN_IF_ERROR(
        self->stream_waits_.StartSums(target, self->id_, self->token_, options.protocol_version, *options.plan));
  }
  return self;
}

absl::Status ClientSession::ShareWords(std::vector<UniqueFd>& fds, const Target& target,
                                       const v1::AttachRankResponse& attach, const Options& options) {
  absl::Status mapped = absl::UnavailableError("SHARDD_CONTROL=grpc");
  if (options.control != Control::kGrpc) {
    mapped = memory_.MapWords(fds, attach, *options.plan);
    // What is there and wrong, or too much, is no sandbox's refusal.
    const bool refused = !mapped.ok() && !absl::IsInternal(mapped) && !absl::IsResourceExhausted(mapped);
    if (!refused || options.control == Control::kRing) return mapped;
  }
  const absl::StatusOr<ToldWords> words =
      memory_.MakeOwnWords(attach, *options.plan, options.protocol_version, JobName(target, options.job_id));
  if (!words.ok()) {
    return options.control == Control::kGrpc ? words.status() : mapped;
  }
  SHARDD_RETURN_IF_ERROR(life_.stream().TellWords(*words));
  ring_.SendBy(life_.stream().writer(), options.plan);
  static std::atomic<bool> warned = false;
  if (options.control != Control::kGrpc && !warned.exchange(true)) {
    const std::string text =
        absl::StrCat("shardd: rank ", options.rank, ": control is by gRPC alone: ", mapped.message(), "\n");
    (void)fputs(text.c_str(), stderr);
  }
  return absl::OkStatus();
}

std::string ClientSession::JobName(const Target& target, uint64_t job_id) {
  return absl::StrCat(target.socket_path, " ", job_id);
}

}  // namespace shardd
