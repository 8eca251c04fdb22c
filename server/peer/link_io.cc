// What a link begins with, traffic on links that are up, and their end with the job's (link_loop.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/loop/core_loop.h"
#include "server/observe/log.h"
#include "server/peer/link_loop.h"
#include "server/peer/peer_wire.h"

namespace shardd {
namespace {

constexpr int64_t kMaxQueuedBytes = int64_t{64} << 20;
constexpr absl::Duration kFarewell = absl::Seconds(2);       // for what is queued at the end
constexpr absl::Duration kLongFarewell = absl::Seconds(30);  // if gRPC takes longer, a log line says so
constexpr absl::Duration kLook = absl::Milliseconds(1);

// Refuses a generation that has no successor, in every message that carries one.
absl::Status CheckGeneration(uint64_t generation) {
  return generation <= kMaxPeerGeneration
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat("there is no attempt of that number (got ", generation,
                                                       ", want at most ", kMaxPeerGeneration, ")"));
}

}  // namespace

v1::PeerHello LinkLoop::LinkHello(absl::string_view token, int to) const {
  v1::PeerHello hello = greeting_.Hello(token, to);
  hello.set_spec(join_.spec);
  hello.set_plan_digest(join_.plan_digest);
  hello.set_has_parameters(events_->HasParameters());
  return hello;
}

LinkLoop::LinkPtr LinkLoop::UpLink(int node) const {
  absl::MutexLock lock(&mutex_);
  return node >= 0 && node < static_cast<int>(up_.size()) ? up_[node] : nullptr;
}

void LinkLoop::Send(int node, const v1::PeerMessage& message) {
  const LinkPtr link = UpLink(node);
  if (link == nullptr) {
    return;
  }
  absl::StatusOr<grpc::ByteBuffer> bytes = EncodePeer(message, kMaxPeerMessageBytes);
  absl::Status status = bytes.status();
  if (status.ok() && !link->control->Write(*std::move(bytes), kMaxQueuedBytes)) {
    status = absl::UnavailableError(
        absl::StrCat("it does not read what it is sent (", kMaxQueuedBytes >> 20, " MiB are waiting)"));
  }
  if (!status.ok()) {  // the daemon cannot continue without the message that was dropped
    Post([self = shared_from_this(), link, status] { self->End(link, status); });
  }
}

void LinkLoop::SendData(int node, const v1::PeerData& header, absl::string_view elements, PeerStream::Sent sent) {
  {
    absl::MutexLock lock(&mutex_);
    ++unsent_;
  }
  PeerStream::Sent counted = [self = shared_from_this(), sent = std::move(sent)](absl::Status status) {
    sent(std::move(status));
    absl::MutexLock lock(&self->mutex_);
    --self->unsent_;
  };
  absl::Status status = absl::UnavailableError("there is no link");
  if (elements.empty() || elements.size() > static_cast<size_t>(PeerLinks::kMaxDataBytes)) {
    status = absl::InvalidArgumentError(absl::StrCat("send gradients to node ", node, ": a piece of ", elements.size(),
                                                     " bytes (want 1 to ", PeerLinks::kMaxDataBytes, ")"));
  } else if (const LinkPtr link = UpLink(node);
             link != nullptr && link->data->WritePiece(EncodeDataHeader(header, static_cast<int64_t>(elements.size())),
                                                       elements, counted)) {
    peers_[node]->sent_bytes += static_cast<int64_t>(elements.size());
    return;
  }
  if (!Post([counted, status] { counted(status); })) {
    counted(status);
  }
}

void LinkLoop::Renew(int node) {
  if (const LinkPtr link = UpLink(node); link != nullptr) {
    Post([self = shared_from_this(), link] { self->End(link, absl::AbortedError("it is made anew")); });
  }
}

void LinkLoop::ReadControl(const LinkPtr& link) {
  link->control->Read([self = shared_from_this(), link](absl::StatusOr<grpc::ByteBuffer> bytes) {
    v1::PeerMessage message;
    const auto size_bytes = static_cast<int64_t>(bytes.ok() ? bytes->Length() : 0);
    absl::Status status = bytes.ok() ? DecodePeer(*bytes, kMaxPeerMessageBytes, &message) : bytes.status();
    if (status.ok() && (message.has_hello() || message.kind_case() == v1::PeerMessage::KIND_NOT_SET)) {
      status = absl::InvalidArgumentError("it sent a message of no known kind, or a second hello");
    }
    for (const uint64_t generation :
         {message.generation(), message.begin().generation(), message.exchange().generation()}) {
      status.Update(CheckGeneration(generation));
    }
    if (!status.ok()) {
      self->Post([self, link, status] { self->End(link, status); });
      return;
    }
    {
      Peer& peer = *self->peers_[link->node];
      absl::MutexLock lock(&peer.events_mutex);
      if (peer.told_up == link.get()) {
        self->events_->OnMessage(link->node, std::move(message), link->backlog->Add(size_bytes));
      }
    }
    link->backlog->WhenRoom([self, link] { self->ReadControl(link); });
  });
}

void LinkLoop::ReadData(const LinkPtr& link) {
  link->data->Read([self = shared_from_this(), link](absl::StatusOr<grpc::ByteBuffer> bytes) {
    absl::Status status = bytes.status();
    grpc::Slice slice;
    if (status.ok() && !bytes->TrySingleSlice(&slice).ok() && !bytes->DumpToSingleSlice(&slice).ok()) {
      status = absl::InvalidArgumentError("its data cannot be read");
    }
    v1::PeerData header;
    absl::string_view elements;
    if (status.ok()) {
      status = DecodeData(slice, &header, &elements);
    }
    if (status.ok()) {
      status = CheckGeneration(header.generation());
    }
    if (!status.ok()) {
      self->Post([self, link, status] { self->End(link, status); });
      return;
    }
    {
      Peer& peer = *self->peers_[link->node];
      peer.received_bytes += static_cast<int64_t>(elements.size());
      absl::MutexLock lock(&peer.events_mutex);
      if (peer.told_up == link.get()) {
        self->events_->OnData(link->node, header, elements);
      }
    }
    self->ReadData(link);
  });
}

void LinkLoop::Keep(std::shared_ptr<PeerStream> stream, std::shared_ptr<grpc::Channel> channel) {
  streams_.push_back({std::move(stream), std::move(channel)});
}

void LinkLoop::LetGo() {
  std::erase_if(streams_, [this](const Kept& kept) {
    const bool gone = kept.stream->gone();
    if (gone && kept.channel != nullptr) transport_.let_go(kept.channel);
    return gone;
  });
}

std::shared_ptr<PeerStream> LinkLoop::CallNode(int node, const std::string& method) {
  std::shared_ptr<grpc::Channel> channel = transport_.make_channel(join_.addresses[node]);
  std::shared_ptr<PeerStream> stream = CallPeer(channel, method);
  Keep(stream, std::move(channel));
  return stream;
}

void LinkLoop::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
  // No events from here on. This thread now owns the loop's state.
  std::vector<LinkPtr> up;
  for (std::unique_ptr<Peer>& peer : peers_) {
    {
      absl::MutexLock lock(&peer->events_mutex);
      peer->told_up = nullptr;
    }
    if (peer->link != nullptr && peer->up) {
      up.push_back(peer->link);
    } else if (peer->link != nullptr) {
      peer->link->control->Abort(absl::AbortedError("the job is closed on this node"));
    }
  }
  const absl::Time end = MonotonicNow() + kFarewell;
  const auto wait = [](const auto& done, absl::Time until) {
    while (!done() && MonotonicNow() < until) {
      absl::SleepFor(kLook);
    }
    return done();
  };
  // Gradients first: the other side ends both streams when it sees the end of the messages.
  wait([&] { return std::all_of(up.begin(), up.end(), [](const LinkPtr& link) { return link->data->idle(); }); }, end);
  for (const LinkPtr& link : up) {
    link->control->Finish(absl::AbortedError(absl::StrCat("node ", join_.node, " has ended its links of the job")));
  }
  // The caller knows that the other side has read everything when its control stream is answered. The other side learns
  // it from the data stream, which ends only after the reader has read the end of the messages.
  const auto parted = [&up] {
    bool all = true;
    for (const LinkPtr& link : up) {
      if (link->calls && link->control->gone() && !link->data->gone()) {
        link->data->Abort(absl::AbortedError("the link has ended"));
      }
      all = all && link->data->gone();
    }
    return all;
  };
  wait(parted, end);
  std::deque<std::function<void()>> tasks;
  {
    absl::MutexLock lock(&mutex_);
    tasks.swap(tasks_);
  }
  stopped_ = true;
  for (std::function<void()>& task : tasks) {  // calls to refuse, `sent` to run
    task();
  }
  for (const Kept& kept : streams_) {
    kept.stream->Abort(absl::AbortedError("the job is closed on this node"));
  }
  const auto quiet = [this] {
    absl::MutexLock lock(&mutex_);
    return unsent_ == 0 &&
           std::all_of(streams_.begin(), streams_.end(), [](const Kept& kept) { return kept.stream->gone(); });
  };
  if (!wait(quiet, MonotonicNow() + kLongFarewell)) {
    LogError(absl::StrCat("job \"", join_.job, "\": links to other nodes have not ended within ",
                          absl::FormatDuration(kLongFarewell), "; waiting on"));
    wait(quiet, absl::InfiniteFuture());
  }
  LetGo();  // here, because whoever lets go of this loop last may be a thread of gRPC
}

}  // namespace shardd
