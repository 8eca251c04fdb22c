#include "server/peer/connecting_channels.h"

#include <pthread.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"

namespace shardd {
namespace {

constexpr absl::Duration kLookAtChannel = absl::Milliseconds(100);  // at a channel, and at the end of all
// Of one channel, whose addresses are tried one after the other. Better a socket that stays than channels without end.
constexpr absl::Duration kLongestConnect = absl::Minutes(1);

}  // namespace

struct ConnectingChannels::Waiting {
  std::shared_ptr<grpc::Channel> channel;
  absl::Time until;
};

ConnectingChannels::ConnectingChannels() : thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "shardd-connects");
}

ConnectingChannels::~ConnectingChannels() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    events_.Shutdown();
  }
  thread_.join();
}

void ConnectingChannels::LetGo(std::shared_ptr<grpc::Channel> channel) {
  Await(std::make_unique<Waiting>(Waiting{std::move(channel), MonotonicNow() + kLongestConnect}));
}

void ConnectingChannels::Await(std::unique_ptr<Waiting> waiting) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || waiting->channel->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_CONNECTING ||
      MonotonicNow() >= waiting->until) {
    return;
  }
  grpc::Channel& channel = *waiting->channel;
  channel.NotifyOnStateChange(GRPC_CHANNEL_CONNECTING, absl::ToChronoTime(absl::Now() + kLookAtChannel), &events_,
                              waiting.release());
}

void ConnectingChannels::Run() {
  void* tag = nullptr;
  bool has_changed = false;
  while (events_.Next(&tag, &has_changed)) {
    Await(std::unique_ptr<Waiting>(static_cast<Waiting*>(tag)));
  }
}

}  // namespace shardd
