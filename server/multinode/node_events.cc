#include "server/multinode/node_events.h"

#include <utility>

#include "server/collective/nodes/node_exchange.h"
#include "server/collective/nodes/node_gather.h"
#include "server/loop/core_loop.h"

namespace shardd {

void NodeEvents::SetExchange(NodeExchange* exchange, NodeGather* gather) {
  absl::MutexLock lock(&mutex_);
  exchange_ = exchange;
  gather_ = gather;
  has_exchange_ = true;
}

void NodeEvents::SetState(TakeState take) {
  absl::MutexLock lock(&mutex_);
  take_state_ = std::move(take);
}

void NodeEvents::ForgetExchange() {
  SetState(nullptr);
  SetExchange(nullptr);
}

void NodeEvents::WithExchange(absl::FunctionRef<void(NodeExchange*)> call) {
  absl::ReaderMutexLock lock(&mutex_, absl::Condition(&has_exchange_));
  if (exchange_ != nullptr) call(exchange_);
}

void NodeEvents::WithGather(absl::FunctionRef<void(NodeGather*)> call) {
  absl::ReaderMutexLock lock(&mutex_, absl::Condition(&has_exchange_));
  if (gather_ != nullptr) call(gather_);
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
  absl::Status same = same_job_(hello, has_parameters_);
  if (!same.ok()) {
    Deliver([node, same](Listener* listener) { listener->OnRefused(node, same); });
  }
  return same;
}

void NodeEvents::OnRefused(int node, const absl::Status& why) {
  Deliver([node, why](Listener* listener) { listener->OnRefused(node, why); });
}

void NodeEvents::OnUp(int node) {
  WithGather([&](NodeGather* gather) { gather->OnUp(node); });
  Deliver([node](Listener* listener) { listener->OnUp(node); });
}

void NodeEvents::OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) {
  if (message.kind_case() == v1::PeerMessage::kExchange) {
    return WithExchange([&](NodeExchange* exchange) { exchange->OnMessage(node, message.exchange()); });
  }
  if (message.kind_case() == v1::PeerMessage::kPull) {
    return WithGather([&](NodeGather* gather) { gather->OnPull(node, message); });
  }
  Deliver([node, message = std::move(message), receipt = std::move(receipt)](Listener* listener) {
    listener->OnMessage(node, message);
  });
}

void NodeEvents::OnDown(int node, absl::Status why) {
  WithExchange([&](NodeExchange* exchange) { exchange->OnDown(node, why); });
  WithGather([&](NodeGather* gather) { gather->OnDown(node, why); });
  Deliver([node, why = std::move(why)](Listener* listener) { listener->OnDown(node, why); });
}

void NodeEvents::OnData(int node, const v1::PeerData& header, absl::string_view elements) {
  if (header.slab() == v1::SLAB_UNSHARDED) {
    return WithGather([&](NodeGather* gather) { gather->OnData(node, header, elements); });
  }
  if (header.slab() == v1::SLAB_UNSPECIFIED) {
    return WithExchange([&](NodeExchange* exchange) { exchange->OnData(node, header, elements); });
  }
  absl::ReaderMutexLock lock(&mutex_);
  if (take_state_) {
    take_state_(node, header, elements);
  }
}

}  // namespace shardd
