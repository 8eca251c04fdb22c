#include "server/job/node_events.h"

#include <utility>

namespace shardd {

void NodeEvents::SetExchange(Exchange exchange) {
  absl::MutexLock lock(&mutex_);
  exchange_ = std::move(exchange);
  has_exchange_ = true;
}

void NodeEvents::SetGather(Gather gather) {
  absl::MutexLock lock(&mutex_);
  gather_ = std::move(gather);
}

void NodeEvents::SetState(TakeState take) {
  absl::MutexLock lock(&mutex_);
  take_state_ = std::move(take);
}

void NodeEvents::ForgetExchange() {
  SetState(nullptr);
  SetGather({});
  SetExchange({});
}

void NodeEvents::WithExchange(absl::FunctionRef<void(const Exchange&, const Gather&)> call) {
  absl::ReaderMutexLock lock(&mutex_, absl::Condition(&has_exchange_));
  call(exchange_, gather_);
}

void NodeEvents::SetListener(Listener* listener) {
  listener_ = listener;
  listened_ = true;
  for (auto& event : std::exchange(early_, {})) {
    if (listener_ != nullptr) {
      event(listener_);
    }
  }
}

void NodeEvents::Deliver(std::function<void(Listener*)> event) {
  loop_->Post([self = shared_from_this(), event = std::move(event)]() mutable {
    if (self->listener_ != nullptr) {
      event(self->listener_);
    } else if (!self->listened_) {
      self->early_.push_back(std::move(event));
    }
  });
}

absl::Status NodeEvents::CheckHello(int node, const v1::PeerHello& hello) {
  absl::Status same = same_job_(hello);
  if (!same.ok()) {
    Deliver([node, same](Listener* listener) { listener->OnRefused(node, same); });
  }
  return same;
}

void NodeEvents::OnUp(int node) {
  WithExchange([&](const Exchange&, const Gather& gather) {
    if (gather.on_up) gather.on_up(node);
  });
  Deliver([node](Listener* listener) { listener->OnUp(node); });
}

void NodeEvents::OnMessage(int node, v1::PeerMessage message) {
  if (message.kind_case() == v1::PeerMessage::kExchange) {
    WithExchange([&](const Exchange& to, const Gather&) {
      if (to.exchange != nullptr) to.exchange->OnMessage(node, message.exchange());
    });
    return;
  }
  if (message.kind_case() == v1::PeerMessage::kPull) {
    WithExchange([&](const Exchange&, const Gather& gather) {
      if (gather.on_pull) gather.on_pull(node, message);
    });
    return;
  }
  Deliver([node, message = std::move(message)](Listener* listener) { listener->OnMessage(node, message); });
}

void NodeEvents::OnDown(int node, absl::Status why) {
  WithExchange([&](const Exchange& to, const Gather& gather) {
    if (to.on_down) to.on_down(node, why);
    if (gather.on_down) gather.on_down(node, why);
  });
  Deliver([node, why = std::move(why)](Listener* listener) { listener->OnDown(node, why); });
}

void NodeEvents::OnData(int node, const v1::PeerData& header, absl::string_view elements) {
  if (header.slab() == v1::SLAB_UNSHARDED) {
    WithExchange([&](const Exchange&, const Gather& gather) {
      if (gather.on_data) gather.on_data(node, header, elements);
    });
    return;
  }
  if (header.slab() != v1::SLAB_UNSPECIFIED) {
    absl::ReaderMutexLock lock(&mutex_);
    if (take_state_) {
      take_state_(node, header, elements);
    }
    return;
  }
  WithExchange([&](const Exchange& to, const Gather&) {
    if (to.on_data) to.on_data(node, header, elements);
  });
}

}  // namespace shardd
