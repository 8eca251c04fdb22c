#include "server/job/node_events.h"

#include <utility>

namespace shardd {

void NodeEvents::SetExchange(Exchange exchange) {
  exchange_ = std::move(exchange);
  has_exchange_.Notify();
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
  Deliver([node](Listener* listener) { listener->OnUp(node); });
}

void NodeEvents::OnMessage(int node, v1::PeerMessage message) {
  if (message.kind_case() == v1::PeerMessage::kExchange) {
    has_exchange_.WaitForNotification();
    exchange_.exchange->OnMessage(node, message.exchange());
    return;
  }
  Deliver([node, message = std::move(message)](Listener* listener) { listener->OnMessage(node, message); });
}

void NodeEvents::OnDown(int node, absl::Status why) {
  has_exchange_.WaitForNotification();
  if (exchange_.on_down) {
    exchange_.on_down(node, why);
  }
  Deliver([node, why = std::move(why)](Listener* listener) { listener->OnDown(node, why); });
}

void NodeEvents::OnData(int node, const v1::PeerData& header, absl::string_view elements) {
  if (header.slab() != v1::SLAB_UNSPECIFIED) {
    Deliver([node, header, bytes = std::string(elements)](Listener* listener) {
      listener->OnState(node, header, bytes);
    });
    return;
  }
  has_exchange_.WaitForNotification();
  if (exchange_.on_data) {
    exchange_.on_data(node, header, elements);
  }
}

}  // namespace shardd
