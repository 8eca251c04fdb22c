#include "server/service/reflection_service.h"

#include <cstdint>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/status/grpc_status.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "server/service/message.h"

namespace shardd {
namespace {

namespace reflection = grpc::reflection::v1alpha;
using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

constexpr char kOperation[] = "reflect";
// A name, and the host that the client takes this one for.
constexpr MessageLimits kRequest = {4 << 10, 64 << 10};

void AddFile(const FileDescriptor* file, std::set<const FileDescriptor*>* added,
             reflection::FileDescriptorResponse* response) {
  if (!added->insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), added, response);
}

// With all that it depends on, because some clients do not ask for that. Null: there is no such file.
void GiveFile(const FileDescriptor* file, absl::string_view wanted, reflection::ServerReflectionResponse* response) {
  if (file == nullptr) {
    response->mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    response->mutable_error_response()->set_error_message(absl::StrCat("reflect: there is no ", wanted));
    return;
  }
  std::set<const FileDescriptor*> added;
  AddFile(file, &added, response->mutable_file_descriptor_response());
}

reflection::ServerReflectionResponse Answered(const reflection::ServerReflectionRequest& request,
                                              const std::vector<std::string>& services) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  reflection::ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case reflection::ServerReflectionRequest::kListServices:
      for (const std::string& name : services) response.mutable_list_services_response()->add_service()->set_name(name);
      break;
    case reflection::ServerReflectionRequest::kFileByFilename:
      GiveFile(pool.FindFileByName(request.file_by_filename()), "file of that name", &response);
      break;
    case reflection::ServerReflectionRequest::kFileContainingSymbol:
      GiveFile(pool.FindFileContainingSymbol(request.file_containing_symbol()), "symbol of that name", &response);
      break;
    default:  // proto3 has no extensions
      response.mutable_error_response()->set_error_code(grpc::StatusCode::UNIMPLEMENTED);
      response.mutable_error_response()->set_error_message("reflect: there are no extensions here");
  }
  return response;
}

class Reactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Reactor(const std::vector<std::string>* services) : services_(services) {}

  void Begin(PendingSlot slot) {
    slot_.emplace(std::move(slot));
    StartRead(&request_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) {  // the client has asked what it wanted
      Finish(grpc::Status::OK);
      return;
    }
    reflection::ServerReflectionRequest request;
    absl::Status status = DecodeWithin(kOperation, request_, kRequest, &request);
    if (status.ok()) {
      absl::StatusOr<grpc::ByteBuffer> answer = Encode(Answered(request, *services_));
      status = answer.status();
      if (answer.ok()) answer_ = *std::move(answer);
    }
    if (status.ok()) {
      StartWrite(&answer_);
    } else {
      Finish(ToGrpcStatus(status));
    }
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  const std::vector<std::string>* const services_;
  std::optional<PendingSlot> slot_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer answer_;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ReflectionService::ServerReflectionInfo(
    grpc::CallbackServerContext* context) {
  auto* reactor = new Reactor(&services_);
  const absl::StatusOr<PeerCredentials> peer = peers_->Lookup(context->peer());
  if (!peer.ok()) {
    reactor->Finish(ToGrpcStatus(peer.status()));
  } else if (!streams_->TryAcquire(peer->uid, kMaxStreamsPerUid, kMaxStreams)) {
    reactor->Finish(ToGrpcStatus(absl::ResourceExhaustedError(
        absl::StrCat(kOperation, ": too many streams are open (want less than ", kMaxStreamsPerUid, " of uid ",
                     peer->uid, " and ", kMaxStreams, " of all); end one"))));
  } else {
    reactor->Begin(PendingSlot(streams_, peer->uid));
  }
  return reactor;
}

}  // namespace shardd
