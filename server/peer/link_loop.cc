#include "server/peer/link_loop.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/loop/core_loop.h"
#include "server/observe/log.h"
#include "server/peer/peer_wire.h"

namespace shardd {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kLongestBackoff = absl::Seconds(1);
constexpr absl::Duration kEndingLook = absl::Milliseconds(100);  // while streams end that belong to no link
constexpr absl::Duration kMoment = absl::Seconds(1);             // without a link, before OnDown
constexpr int64_t kMaxPendingBytes = int64_t{4} << 20;           // of one node's messages; beyond it, nothing is read
constexpr size_t kTokenBytes = 16;
constexpr char kLinkMethod[] = "/shardd.v1.PeerService/Link";
constexpr char kDataMethod[] = "/shardd.v1.PeerService/Data";

std::string RandomBytes(size_t count) {
  std::random_device device;  // the kernel's
  std::string bytes;
  while (bytes.size() < count) {
    bytes.push_back(static_cast<char>(device()));
  }
  return bytes;
}

// Only another job of the same user is final. Refusals by a daemon of another version, or because of another user's
// job, pass: the first while daemons are upgraded one by one, the second when that user closes the job.
bool ForGood(const absl::Status& status) { return absl::IsFailedPrecondition(status); }

}  // namespace

std::shared_ptr<LinkLoop> LinkLoop::Start(PeerJoin join, PeerLinks::Events* events, Transport transport) {
  std::shared_ptr<LinkLoop> loop(new LinkLoop(std::move(join), events, std::move(transport)));
  loop->thread_ = std::thread([loop = loop.get()] { loop->Run(); });  // Stop joins it
  return loop;
}

LinkLoop::LinkLoop(PeerJoin join, PeerLinks::Events* events, Transport transport)
    : join_(std::move(join)),
      events_(events),
      transport_(std::move(transport)),
      token_(RandomBytes(kTokenBytes / 2)),
      up_(join_.addresses.size()) {
  for (size_t node = 0; node < join_.addresses.size(); ++node) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->down_since = peers_.back()->next_call = MonotonicNow();
    peers_.back()->backoff = kFirstBackoff;
    peers_.back()->last_error =
        absl::UnavailableError(static_cast<int>(node) < join_.node
                                   ? "it has not answered yet"
                                   : "it has not called yet: the job is not open there, it does not reach this "
                                     "node, or one of the two certificates is not accepted (expired?)");
  }
}

LinkLoop::~LinkLoop() = default;

std::string LinkLoop::Name(int node) const {
  return absl::StrCat("job \"", join_.job, "\": link to node ", node, " (", join_.addresses[node], ")");
}

bool LinkLoop::Post(std::function<void()> task) {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) {
      return false;
    }
    tasks_.push_back(std::move(task));
  }
  Wake();
  return true;
}

void LinkLoop::Wake() {
  {
    const std::lock_guard<std::mutex> lock(wake_mutex_);
    woken_ = true;
  }
  wake_.notify_one();
}

void LinkLoop::Run() {
  for (;;) {
    std::deque<std::function<void()>> tasks;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) {
        return;  // Stop runs the rest
      }
      tasks.swap(tasks_);
    }
    for (std::function<void()>& task : tasks) {
      task();
    }
    const absl::Time next = Tend();
    std::unique_lock<std::mutex> lock(wake_mutex_);
    wake_.wait_for(lock, absl::ToChronoNanoseconds(next - MonotonicNow()), [this] { return woken_; });
    woken_ = false;
  }
}

// Handles what is due. Returns when to look again.
absl::Time LinkLoop::Tend() {
  const absl::Time now = MonotonicNow();
  absl::Time next = now + absl::Seconds(10);
  LetGo();
  size_t wanted = 0;
  for (const std::unique_ptr<Peer>& peer : peers_) wanted += peer->link == nullptr ? 0 : peer->link->streams();
  if (streams_.size() > wanted) next = now + kEndingLook;
  for (int node = 0; node < static_cast<int>(peers_.size()); ++node) {
    Peer& peer = *peers_[node];
    if (node == join_.node || peer.up || peer.refused) {
      continue;
    }
    if (peer.link != nullptr && now >= peer.link->deadline) {
      End(peer.link, absl::UnavailableError(
                         absl::StrCat("no answer within ", absl::FormatDuration(transport_.handshake_patience))));
    }
    if (!peer.told.has_value() && now >= peer.down_since + kMoment) {
      TellDown(peer, node, peer.last_error);
    }
    if (peer.link == nullptr && node < join_.node && now >= peer.next_call) {
      Call(node);
    }
    if (!peer.told.has_value()) {
      next = std::min(next, peer.down_since + kMoment);
    }
    if (peer.link != nullptr) {
      next = std::min(next, peer.link->deadline);
    } else if (node < join_.node) {
      next = std::min(next, peer.next_call);
    }
  }
  return next;
}

void LinkLoop::Call(int node) {
  auto link = std::make_shared<Link>();
  link->node = node;
  link->backlog = std::make_shared<PeerBacklog>(kMaxPendingBytes);
  link->token = token_ + RandomBytes(kTokenBytes / 2);
  link->calls = true;
  link->deadline = MonotonicNow() + transport_.handshake_patience;
  v1::PeerMessage message;
  *message.mutable_hello() = LinkHello(link->token, node);
  absl::StatusOr<grpc::ByteBuffer> bytes = EncodePeer(message, kMaxPeerHelloBytes);
  if (!bytes.ok()) {  // Join has checked this
    LogError(absl::StrCat(Name(node), ": ", bytes.status().ToString()));
    return;
  }
  peers_[node]->link = link;
  link->control = CallNode(node, kLinkMethod);
  link->control->Write(*std::move(bytes), kMaxPeerHelloBytes);
  link->control->Read([self = shared_from_this(), link](absl::StatusOr<grpc::ByteBuffer> answer) {
    self->Post([self, link, answer = std::move(answer)] { self->HandleAnswer(link, answer); });
  });
}

void LinkLoop::HandleAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes) {
  if (!Current(link)) {
    return;
  }
  v1::PeerMessage message;
  absl::Status status = bytes.ok() ? DecodePeer(*bytes, kMaxPeerHelloBytes, &message) : bytes.status();
  if (status.ok()) {
    status = !message.has_hello() ? absl::InvalidArgumentError("it did not begin with hello")
                                  : greeting_.Check(message.hello());
  }
  if (status.ok() && message.hello().node() != link->node) {
    status = absl::FailedPreconditionError(absl::StrCat("another node answers there (got node ", message.hello().node(),
                                                        "); nodes.addresses must be in the order of nodes"));
  }
  if (status.ok()) {
    status = greeting_.CheckSecret(message.hello(), link->token);
  }
  if (status.ok()) {
    status = AskEvents(message.hello());
  }
  if (!status.ok()) {
    End(link, status);
    return;
  }
  link->protocol_version = PeerGreeting::CommonProtocol(message.hello()).value_or(0);  // Check has found one
  link->takes_writes_where_cut = message.hello().takes_writes_where_cut();
  link->takes_extensions = message.hello().takes_extensions();
  link->takes_fetch_ends = message.hello().takes_fetch_ends();
  v1::PeerData first;
  *first.mutable_hello() = greeting_.Hello(link->token, link->node);
  link->data = CallNode(link->node, kDataMethod);
  link->data->Write(*EncodePeer(first, kMaxPeerHeaderBytes), kMaxPeerHeaderBytes);
  link->data->Read([self = shared_from_this(), link](absl::StatusOr<grpc::ByteBuffer> answer) {
    self->Post([self, link, answer = std::move(answer)] { self->HandleDataAnswer(link, answer); });
  });
}

void LinkLoop::HandleDataAnswer(const LinkPtr& link, absl::StatusOr<grpc::ByteBuffer> bytes) {
  if (!Current(link)) {
    return;
  }
  v1::PeerData answer;
  absl::Status status = bytes.ok() ? DecodePeer(*bytes, kMaxPeerHeaderBytes, &answer) : bytes.status();
  if (status.ok() && (!answer.has_hello() || answer.hello().token() != link->token)) {
    status = absl::InvalidArgumentError("it did not begin its data with hello");
  }
  if (!status.ok()) {
    End(link, status);
    return;
  }
  Up(link, nullptr);
  ReadControl(link);
  ReadData(link);
}

void LinkLoop::Accept(std::shared_ptr<PeerStream> control, v1::PeerHello hello, PeerIdentity caller) {
  if (!Post([self = shared_from_this(), control, hello = std::move(hello), caller = std::move(caller)] {
        self->HandleCall(control, hello, caller);
      })) {
    control->Abort(absl::NotFoundError("the job is being closed here"));
  }
}

void LinkLoop::AcceptData(std::shared_ptr<PeerStream> data, const v1::PeerHello& hello) {
  if (!Post([self = shared_from_this(), data, hello] { self->HandleDataCall(data, hello); })) {
    data->Abort(absl::NotFoundError("the job is being closed here"));
  }
}

void LinkLoop::HandleCall(const std::shared_ptr<PeerStream>& control, const v1::PeerHello& hello,
                          const PeerIdentity& caller) {
  Keep(control);
  absl::Status status = stopped_ ? absl::NotFoundError("the job is being closed here") : greeting_.Check(hello);
  if (status.ok() && hello.node() < join_.node) {
    status = absl::FailedPreconditionError(absl::StrCat("nodes call those with smaller numbers (got node ",
                                                        hello.node(), " calling node ", join_.node, ")"));
  }
  if (status.ok()) {
    status = CheckIdentity(caller, hello.node(), join_.addresses[hello.node()]);
  }
  if (status.ok() && hello.token().size() != kTokenBytes) {
    status = absl::InvalidArgumentError(
        absl::StrCat("token is not one (got ", hello.token().size(), " bytes, want ", kTokenBytes, ")"));
  }
  if (!status.ok()) {  // it belongs to no link of this job
    LogOf(join_.uid, LogLevel::kWarning,
          absl::StrCat("job \"", join_.job, "\": a link was refused: ", status.message()));
    control->Abort(status);
    return;
  }
  const int node = hello.node();
  Peer& peer = *peers_[node];
  if (status = greeting_.CheckSecret(hello, hello.token()); !status.ok()) {
    if (!peer.up) {
      absl::MutexLock lock(&peer.events_mutex);
      events_->OnRefused(node, status);
    }
    RefuseCall(peer, node, status, control);
    return;
  }
  if (peer.link != nullptr) {
    if (peer.link->token.substr(0, kTokenBytes / 2) != hello.token().substr(0, kTokenBytes / 2)) {
      control->Abort(absl::AlreadyExistsError(
          absl::StrCat("node ", node, " has a link to node ", join_.node, " of job \"", join_.job,
                       "\" already, of another daemon, or of one whose end is not known yet; it is tried again")));
      return;
    }
    End(peer.link, absl::AbortedError("the node has made a new link"));
  }
  if (status = AskEvents(hello); !status.ok()) {
    RefuseCall(peer, node, status, control);
    return;
  }
  auto link = std::make_shared<Link>();
  link->node = node;
  link->backlog = std::make_shared<PeerBacklog>(kMaxPendingBytes);
  link->token = hello.token();
  link->protocol_version = PeerGreeting::CommonProtocol(hello).value_or(0);  // Check has found one
  link->takes_writes_where_cut = hello.takes_writes_where_cut();
  link->takes_extensions = hello.takes_extensions();
  link->takes_fetch_ends = hello.takes_fetch_ends();
  link->deadline = MonotonicNow() + transport_.handshake_patience;
  link->control = control;
  v1::PeerMessage answer;
  *answer.mutable_hello() = LinkHello(link->token, node);
  peer.link = link;
  control->Write(*EncodePeer(answer, kMaxPeerHelloBytes), kMaxPeerHelloBytes);
  ReadControl(link);  // to notice its end; no message comes before Data is answered
}

void LinkLoop::HandleDataCall(const std::shared_ptr<PeerStream>& data, const v1::PeerHello& hello) {
  Keep(data);
  const bool in_range = hello.node() > join_.node && hello.node() < static_cast<int>(peers_.size());
  const LinkPtr link = in_range ? peers_[hello.node()]->link : nullptr;
  if (link == nullptr || !Current(link) || link->calls || link->data != nullptr || link->token != hello.token()) {
    data->Abort(
        absl::UnauthenticatedError(absl::StrCat("no link of job \"", join_.job, "\" waits for this data stream")));
    return;
  }
  link->data = data;
  v1::PeerData answer;
  *answer.mutable_hello() = greeting_.Hello(link->token, link->node);
  const grpc::ByteBuffer bytes = *EncodePeer(answer, kMaxPeerHeaderBytes);
  Up(link, &bytes);
  ReadData(link);
}

void LinkLoop::RefuseCall(Peer& peer, int node, const absl::Status& why, const std::shared_ptr<PeerStream>& control) {
  control->Abort(why);
  if (peer.up) {
    return;
  }
  // Not this node's end: the caller may be left over from an earlier job, and the right one may still call.
  const absl::Status refused = absl::UnavailableError(absl::StrCat("its call was refused: ", why.message()));
  if (const absl::Status before = std::exchange(peer.last_error, refused); before != refused) {
    TellDown(peer, node, refused);
  }
}

absl::Status LinkLoop::AskEvents(const v1::PeerHello& hello) {
  absl::MutexLock lock(&peers_[hello.node()]->events_mutex);
  return events_->CheckHello(hello.node(), hello);
}

void LinkLoop::Up(const LinkPtr& link, const grpc::ByteBuffer* answer) {
  Peer& peer = *peers_[link->node];
  peer.up = true;
  peer.up_since = MonotonicNow();
  peer.told.reset();
  // After the answer, messages may arrive; they wait until OnUp was called. Before it, none is sent.
  absl::MutexLock lock(&peer.events_mutex);
  if (answer != nullptr) {
    link->data->Write(*answer, kMaxPeerHeaderBytes);
  }
  {
    absl::MutexLock up_lock(&mutex_);
    up_[link->node] = link;
  }
  peer.told_up = link.get();
  events_->OnUp(link->node);
}

void LinkLoop::End(LinkPtr link, const absl::Status& why) {  // NOLINT(performance-unnecessary-value-param)
  if (!Current(link)) {
    return;
  }
  Peer& peer = *peers_[link->node];
  const absl::Time now = MonotonicNow();
  const bool was_up = std::exchange(peer.up, false);
  peer.link.reset();
  {
    absl::MutexLock lock(&mutex_);
    up_[link->node].reset();
  }
  for (const std::shared_ptr<PeerStream>& stream : {link->data, link->control}) {
    if (stream != nullptr) {
      stream->Abort(absl::AbortedError(absl::StrCat("the link has ended: ", why.message())));
    }
  }
  if (was_up) {
    peer.down_since = now;
    if (now - peer.up_since > kLongestBackoff) {
      peer.backoff = kFirstBackoff;
    }
  }
  peer.next_call = now + peer.backoff;
  peer.backoff = std::min(2 * peer.backoff, kLongestBackoff);
  peer.last_error = why;
  peer.refused = link->calls && ForGood(why);
  if (was_up || peer.refused || (peer.told.has_value() && *peer.told != why.code())) {
    TellDown(peer, link->node, why);
  }
}

void LinkLoop::TellDown(Peer& peer, int node, const absl::Status& why) {
  peer.told = why.code();
  const std::string own = transport_.own_problem();
  std::string text = absl::StrCat(Name(node), ": ", why.message());
  // OpenSSL knows which of the two it is, and gRPC does not pass it on.
  if (absl::StrContains(why.message(), "certificate verify failed")) {
    absl::StrAppend(&text, "; the certificate of node ", node,
                    " has expired, or is of another authority: an expired one is named in that daemon's log");
  }
  if (!own.empty()) absl::StrAppend(&text, "; ", own);
  const absl::Status named(why.code(), text);
  absl::MutexLock lock(&peer.events_mutex);
  peer.told_up = nullptr;
  events_->OnDown(node, named);
}

}  // namespace shardd
