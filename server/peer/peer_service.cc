#include "server/peer/peer_service.h"

#include <grpcpp/alarm.h>

#include <type_traits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "server/peer/peer_greeting.h"
#include "server/peer/peer_stream.h"
#include "server/peer/peer_wire.h"

namespace shardd {
namespace {

constexpr absl::Duration kHelloPatience = absl::Seconds(10);
// Limit of streams without hello. Daemons send hello at once, and call again if they are refused.
constexpr int kMaxUnnamedStreams = 128;

class PluginRemover final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override { plugins->clear(); }
};

}  // namespace

std::unique_ptr<grpc::ServerBuilderOption> WithoutPlugins() { return std::make_unique<PluginRemover>(); }

std::shared_ptr<LinkLoop> PeerService::Add(const PeerJoin& join, PeerLinks::Events* events,
                                           LinkLoop::Transport transport) {
  absl::MutexLock lock(&mutex_);
  auto [place, added] = jobs_.try_emplace({join.job, join.uid}, nullptr);
  if (!added) {
    return nullptr;
  }
  place->second = LinkLoop::Start(join, events, std::move(transport));
  return place->second;
}

void PeerService::Remove(const PeerJoin& join) {
  std::shared_ptr<LinkLoop> loop;
  absl::MutexLock lock(&mutex_);
  if (const auto found = jobs_.find({join.job, join.uid}); found != jobs_.end()) {
    loop = std::move(found->second);
    jobs_.erase(found);
  }
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PeerService::Link(grpc::CallbackServerContext* context) {
  return Take<v1::PeerMessage>(context, kMaxPeerHelloBytes);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PeerService::Data(grpc::CallbackServerContext* context) {
  return Take<v1::PeerData>(context, kMaxPeerHeaderBytes);
}

template <typename Message>
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PeerService::Take(grpc::CallbackServerContext* context,
                                                                               int64_t max_bytes) {
  const std::shared_ptr<ServedPeerStream> stream = ServedPeerStream::Make(context);
  if (++unnamed_ > kMaxUnnamedStreams) {
    --unnamed_;
    stream->Abort(absl::ResourceExhaustedError(absl::StrCat(
        "too many streams between nodes without hello (want at most ", kMaxUnnamedStreams, "); it is tried again")));
    return stream.get();
  }
  const std::shared_ptr<void> unnamed(nullptr, [this](void*) { --unnamed_; });
  // Ends connections that say nothing.
  auto alarm = std::make_shared<grpc::Alarm>();
  alarm->Set(absl::ToChronoTime(absl::Now() + kHelloPatience),
             [weak = std::weak_ptr<PeerStream>(stream)](bool expired) {
               if (const std::shared_ptr<PeerStream> late = expired ? weak.lock() : nullptr; late != nullptr) {
                 late->Abort(absl::DeadlineExceededError("no hello"));
               }
             });
  stream->Read([this, stream, alarm, max_bytes, unnamed,
                caller = IdentityOf(*context->auth_context())](absl::StatusOr<grpc::ByteBuffer> bytes) {
    alarm->Cancel();
    if (!bytes.ok()) {
      return;
    }
    Message message;
    absl::Status status = DecodePeer(*bytes, max_bytes, &message);
    if (status.ok() && !message.has_hello()) {
      status = absl::InvalidArgumentError("a stream between nodes begins with hello");
    }
    if (!status.ok()) {
      stream->Abort(status);
      return;
    }
    Place(stream, std::move(*message.mutable_hello()), caller, std::is_same_v<Message, v1::PeerData>);
  });
  return stream.get();
}

void PeerService::Place(const std::shared_ptr<PeerStream>& stream, v1::PeerHello hello, PeerIdentity caller,
                        bool data) {
  // Checked before the name, whose meaning in another version is unknown.
  if (const absl::Status status = PeerGreeting::CommonProtocol(hello).status(); !status.ok()) {
    stream->Abort(status);
    return;
  }
  std::shared_ptr<LinkLoop> loop;
  {
    absl::MutexLock lock(&mutex_);
    // Where the user has none of that name and another user has, that one's answer says so.
    auto found = jobs_.find({hello.job(), hello.uid()});
    found = found != jobs_.end() ? found : jobs_.lower_bound({hello.job(), 0});
    if (found != jobs_.end() && found->first.first == hello.job()) {
      loop = found->second;
    }
  }
  if (loop == nullptr) {
    stream->Abort(absl::NotFoundError(
        absl::StrCat("job \"", absl::CHexEscape(hello.job()), "\" is not open on this node yet; it is tried again")));
  } else if (data) {
    loop->AcceptData(stream, hello);
  } else {
    loop->Accept(stream, std::move(hello), std::move(caller));
  }
}

}  // namespace shardd
