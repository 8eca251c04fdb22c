#include "tests/faults/raw_client.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/create_channel_posix.h"
#include "tests/common/shm/process_util.h"
#include "tests/e2e/cluster.h"

namespace shardd::faults {
namespace {

void SetLimit(grpc::ClientContext& context) { context.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit)); }

}  // namespace

UniqueFd ConnectTo(const std::string& socket_path) {
  UniqueFd connected(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path.c_str(), sizeof(address.sun_path) - 1);
  if (connect(connected.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return UniqueFd();
  }
  return connected;
}

v1::JobSpec SpecOf(const e2e::Args& args) {
  v1::JobSpec spec;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(e2e::SpecJson(args), &spec).ok());
  return spec;
}

RawStream::RawStream(v1::TrainerService::Stub& stub) {
  SetLimit(context_);
  stream_ = stub.Session(&context_);
}

RawStream::~RawStream() {
  if (!finished_) {
    context_.TryCancel();
    (void)End();
  }
}

void RawStream::Hello(uint64_t session_id, const std::string& token) {
  v1::SessionRequest request;
  request.mutable_hello()->set_session_id(session_id);
  request.mutable_hello()->set_token(token);
  (void)Write(request);
}

v1::SessionEvent RawStream::Read() {
  v1::SessionEvent event;
  return stream_->Read(&event) ? event : v1::SessionEvent();
}

absl::Status RawStream::End() {
  absl::Status aborted;
  for (v1::SessionEvent event; stream_->Read(&event);) {
    if (event.has_aborted()) {
      aborted = absl::Status(static_cast<absl::StatusCode>(event.aborted().code()), event.aborted().message());
    }
  }
  finished_ = true;
  const absl::Status end = FromGrpcStatus(stream_->Finish());
  return aborted.ok() ? end : aborted;
}

namespace {

std::shared_ptr<grpc::Channel> ConnectAnew(const std::string& socket_path) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel("unix:" + socket_path, grpc::InsecureChannelCredentials(), arguments);
}

std::shared_ptr<grpc::Channel> ChannelOn(UniqueFd connected) {
  fcntl(connected.get(), F_SETFL, fcntl(connected.get(), F_GETFL) | O_NONBLOCK);
  return grpc::CreateInsecureChannelFromFd("shardd", connected.release());
}

}  // namespace

RawClient::RawClient(const std::string& socket_path, const std::shared_ptr<grpc::Channel>& channel)
    : socket_path_(socket_path),
      stub_(v1::TrainerService::NewStub(channel)),
      jobs_(v1::JobsService::NewStub(channel)),
      generic_(std::make_unique<grpc::GenericStub>(channel)) {}
RawClient::RawClient(const std::string& socket_path) : RawClient(socket_path, ConnectAnew(socket_path)) {}
RawClient::RawClient(const std::string& socket_path, UniqueFd connected)
    : RawClient(socket_path, ChannelOn(std::move(connected))) {}

void RawClient::Prepare(grpc::ClientContext& context) const {
  SetLimit(context);
  if (!secret_.empty()) context.AddMetadata("shardd-job-secret-bin", secret_);
}

absl::Status RawClient::Trace(const v1::TraceJobRequest& request) {
  grpc::ClientContext context;
  Prepare(context);
  const auto reader = jobs_->TraceJob(&context, request);
  for (v1::TraceJobResponse message; reader->Read(&message);) {
  }
  return FromGrpcStatus(reader->Finish());
}

absl::StatusOr<v1::OpenJobResponse> RawClient::Open(const v1::OpenJobRequest& request) {
  grpc::ClientContext context;
  Prepare(context);
  v1::OpenJobResponse response;
  SHARDD_RETURN_IF_ERROR(FromGrpcStatus(stub_->OpenJob(&context, request, &response)));
  return response;
}

absl::StatusOr<v1::OpenJobResponse> RawClient::Open(const v1::JobSpec& spec) {
  v1::OpenJobRequest request;
  request.set_protocol_version(kProtocolVersions.newest);
  *request.mutable_spec() = spec;
  return Open(request);
}

absl::StatusOr<v1::AttachRankResponse> RawClient::Attach(uint64_t job_id, int rank, bool replace) {
  grpc::ClientContext context;
  Prepare(context);
  v1::AttachRankRequest request;
  request.set_job_id(job_id);
  request.set_rank(rank);
  request.set_replace(replace);
  request.set_protocol_version(kProtocolVersions.newest);
  v1::AttachRankResponse response;
  SHARDD_RETURN_IF_ERROR(FromGrpcStatus(stub_->AttachRank(&context, request, &response)));
  return response;
}

absl::Status RawClient::Close(uint64_t job_id) {
  grpc::ClientContext context;
  Prepare(context);
  v1::CloseJobRequest request;
  request.set_job_id(job_id);
  v1::CloseJobResponse response;
  return FromGrpcStatus(stub_->CloseJob(&context, request, &response));
}

absl::Status RawClient::Call(const std::string& method, const std::string& bytes) {
  grpc::ClientContext context;
  Prepare(context);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::CompletionQueue queue;
  const auto call = generic_->PrepareUnaryCall(&context, method, request, &queue);
  grpc::Status status;
  call->StartCall();
  call->Finish(&response, &status, &status);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return FromGrpcStatus(status);
}

absl::Status RawClient::Enter(const v1::JobSpec& spec, int rank) {
  SHARDD_ASSIGN_OR_RETURN(plan_, PlanShards(spec));
  layout_ = MakeSessionLayout(plan_);
  SHARDD_ASSIGN_OR_RETURN(const v1::OpenJobResponse job, Open(spec));
  SHARDD_ASSIGN_OR_RETURN(session_, Attach(job.job_id(), rank));
  stream_ = std::make_unique<RawStream>(*stub_);
  stream_->Hello(session_.session_id(), session_.token());
  if (!stream_->Read().has_attached()) {
    return absl::InternalError("the daemon did not confirm the session");
  }
  SHARDD_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds,
                          FetchSessionFds(socket_path_, session_.session_id(), session_.token(), testing::kLimit));
  SHARDD_ASSIGN_OR_RETURN(session_slab_,
                          MappedSlab::Map(std::move(fds[kFdSessionMemory]), layout_.memory_bytes, /*writable=*/true));
  SHARDD_ASSIGN_OR_RETURN(
      daemon_slab_, MappedSlab::Map(std::move(fds[kFdDaemonPage]), layout_.daemon_page_bytes, /*writable=*/false));
  doorbell_ = std::move(fds[kFdDoorbell]);
  memory_ = SessionMemoryView(session_slab_.data(), layout_.ring_offset_bytes, layout_.masks_offset_bytes);
  return absl::OkStatus();
}

void RawClient::Send(CommandRecord record, int64_t sequence) {
  record.sequence = sequence < 0 ? submitted_ : static_cast<uint64_t>(sequence);
  memory_.record(submitted_) = record;
  ++submitted_;
  Announce(TimelineValue(session_.epoch(), submitted_));
}

void RawClient::Announce(uint64_t value) {
  memory_.page().submitted.store(value);
  const uint64_t one = 1;
  (void)!write(doorbell_.get(), &one, sizeof(one));
}

bool RawClient::HasConsumed() const {
  return daemon_page().consumed.load() >= TimelineValue(session_.epoch(), submitted_);
}

bool RawClient::Consumed() {
  return testing::PollUntil([this] { return HasConsumed(); });
}

}  // namespace shardd::faults
