// The steps of gathers by NCCL (nccl_gather.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/local/fan_out.h"
#include "server/collective/nodes/nccl/nccl_gather.h"
#include "server/peer/peer_links.h"

namespace shardd {

void NcclGather::Run() {
  absl::MutexLock lock(&mutex_);
  const auto awake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_; };
  for (;;) {
    while (FinishOne() || SendOne() || CopyOne() || AskOne() || DecideOne() || BeginOne()) {
    }
    if (stopping_ && calls_.empty() && under_way_ == 0 && copies_ == 0) return;
    mutex_.Await(absl::Condition(&awake));
    woken_ = false;
  }
}

bool NcclGather::FinishOne() {
  const auto found = std::find_if(calls_.begin(), calls_.end(),
                                  [](const CallPtr& call) { return call->ended.has_value() && !call->copying; });
  if (found == calls_.end()) return false;
  const CallPtr call = *found;
  calls_.erase(found);
  mutex_.Unlock();
  std::exchange(call->done, nullptr)(*call->ended);
  mutex_.Lock();
  return true;
}

bool NcclGather::SendOne() {
  if (outgoing_.empty()) return false;
  const auto [node, message] = std::move(outgoing_.front());
  outgoing_.pop_front();
  mutex_.Unlock();
  options_.links->Send(node, message);
  mutex_.Lock();
  return true;
}

bool NcclGather::CopyOne() {
  for (const CallPtr& call : calls_) {
    if (call->ended.has_value() || call->copying) continue;
    const auto found = std::find_if(slots_.begin(), slots_.end(),
                                    [&](const Slot& slot) { return !slot.filling && slot.key == call->key; });
    if (found == slots_.end()) continue;
    const auto slot = static_cast<int>(found - slots_.begin());
    call->copying = true;
    ++found->readers;
    ++copies_;
    const CallPtr copied = call;
    mutex_.Unlock();
    std::vector<DevicePart> parts;
    const int group = copied->key.group;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::vector<DeviceOp>& ops = PartOf(parts, options_.devices[static_cast<size_t>(rank)]).ops;
      for (int node = 0; node < nodes_; ++node) {
        if (node == node_ || !IsInRow(node)) continue;
        for (DeviceOp& op : Part(group, node, rank).UnpackOps(At(rank, slot, group, node), copied->image)) {
          ops.push_back(std::move(op));
        }
      }
    }
    FanOut(std::move(parts), StreamId::kUnshard, copied->label, options_.devices.front(), absl::OkStatus(),
           [this, copied, slot](absl::Status status) { Copied(copied, slot, std::move(status)); });
    mutex_.Lock();
    return true;
  }
  return false;
}

void NcclGather::Copied(const CallPtr& call, int slot, absl::Status status) {
  absl::MutexLock lock(&mutex_);
  call->copying = false;
  --slots_[static_cast<size_t>(slot)].readers;
  --copies_;
  EndLocked(call, status);
  woken_ = true;
}

bool NcclGather::AskOne() {
  for (const CallPtr& call : calls_) {
    const auto comes = [&](const Key& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return asked_.contains(key) ||
             std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.key == key; }) ||
             std::any_of(orders_.begin(), orders_.end(),
                         [&](const Order& order) { return order.key == key && Receives(order); });
    };
    if (call->ended.has_value() || call->copying || comes(call->key)) continue;
    touched_ = true;
    asked_.insert(call->key);
    if (node_ == 0) {
      asks_.emplace_back(0, call->key);
      return true;
    }
    v1::PeerMessage message;
    message.set_generation(generation_);
    message.mutable_pull()->set_group(call->key.group);
    message.mutable_pull()->set_version(call->key.version);
    outgoing_.emplace_back(0, std::move(message));
    return true;
  }
  return false;
}

bool NcclGather::DecideOne() {
  constexpr size_t kAhead = 2;  // so many are said before they can begin here
  if (asks_.empty() || orders_.size() >= kAhead) return false;
  if (last_readable_ == 0 && asks_.front().second.version > 1) return false;  // whether it can be is not known yet
  for (const auto& [node, key] : asks_) {
    if (CanExistLocked(key.version)) continue;
    FailLocked(absl::InvalidArgumentError(absl::StrCat("node ", node, " asks for a version that cannot be (got ",
                                                       key.version, ", node 0 had ", last_readable_, " last)")));
    return true;
  }
  Order order{generation_, next_order_++, asks_.front().second, {}};
  std::set<int> receivers;
  for (const auto& [node, key] : asks_) {
    if (key == order.key) receivers.insert(node);
  }
  asks_.erase(std::remove_if(asks_.begin(), asks_.end(), [&](const auto& ask) { return ask.second == order.key; }),
              asks_.end());
  order.receivers.assign(receivers.begin(), receivers.end());
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_pull()->set_transfer(order.sequence);
  message.mutable_pull()->set_group(order.key.group);
  message.mutable_pull()->set_version(order.key.version);
  for (const int node : order.receivers) message.mutable_pull()->add_receivers(node);
  for (int node = 1; node < nodes_; ++node) outgoing_.emplace_back(node, message);
  if (Receives(order)) asked_.erase(order.key);
  orders_.push_back(std::move(order));
  return true;
}

bool NcclGather::Receives(const Order& order) const {
  return std::find(order.receivers.begin(), order.receivers.end(), node_) != order.receivers.end();
}

bool NcclGather::Sends(const Order& order) const {
  return std::any_of(order.receivers.begin(), order.receivers.end(),
                     [this](int node) { return node != node_ && IsInRow(node); });
}

bool NcclGather::Holds(int group) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (Part(group, node_, rank).bytes() > 0) return true;
  }
  return false;
}

bool NcclGather::CanExistLocked(uint64_t version) const { return last_readable_ == 0 || version <= last_readable_ + 1; }

bool NcclGather::BeginOne() {
  if (orders_.empty() || under_way_ > 0) return false;
  Order order = orders_.front();
  // What this node has no part in may be of any version: it goes on without waiting for those that take part.
  const bool takes_part = Receives(order) || (Sends(order) && Holds(order.key.group));
  if (takes_part && readable_ != order.key.version) {
    if (readable_ < order.key.version) return false;
    FailLocked(absl::FailedPreconditionError(absl::StrCat("gather of group \"", NameOf(order.key.group),
                                                          "\" of version ", order.key.version, ": node ", node_,
                                                          " has version ", readable_, " now")));
    return true;
  }
  if (Receives(order)) {
    // What was brought last stays, because other pools of this node may need it soon.
    const int next = (last_slot_ + 1) % kSlots;
    Slot& slot = slots_[static_cast<size_t>(next)];
    if (slot.filling || slot.readers > 0) return false;
    order.slot = last_slot_ = next;
    slot.key = order.key;
    slot.filling = true;
  }
  orders_.pop_front();
  ++under_way_;
  touched_ = true;
  if (!takes_part || !Sends(order)) {
    mutex_.Unlock();
    Packed(order, absl::OkStatus());
    mutex_.Lock();
    return true;
  }
  reading_ = true;
  mutex_.Unlock();
  std::vector<DevicePart> parts;
  for (int rank = 0; rank < ranks_; ++rank) {
    std::vector<DeviceOp>& ops = PartOf(parts, options_.devices[static_cast<size_t>(rank)]).ops;
    for (DeviceOp& op :
         Part(order.key.group, node_, rank).PackOps(options_.source, options_.staging[static_cast<size_t>(rank)])) {
      ops.push_back(std::move(op));
    }
  }
  FanOut(std::move(parts), StreamId::kUnshard, absl::StrCat("send ", NameOf(order.key.group)), options_.devices.front(),
         absl::OkStatus(), [this, order](absl::Status status) { Packed(order, std::move(status)); });
  mutex_.Lock();
  return true;
}

std::vector<NodeMove> NcclGather::MovesOf(const Order& order) const {
  std::vector<NodeMove> moves;
  const int group = order.key.group;
  for (int rank = 0; rank < ranks_; ++rank) {
    const int64_t own_bytes = Part(group, node_, rank).bytes();
    for (const int node : order.receivers) {
      if (node == node_ || !IsInRow(node) || own_bytes == 0) continue;
      moves.push_back({rank, {node, options_.staging[static_cast<size_t>(rank)], nullptr, own_bytes}});
    }
    for (int node = 0; order.slot >= 0 && node < nodes_; ++node) {
      const int64_t bytes = Part(group, node, rank).bytes();
      if (node == node_ || !IsInRow(node) || bytes == 0) continue;
      moves.push_back({rank, {node, nullptr, At(rank, order.slot, group, node), bytes}});
    }
  }
  return moves;
}

void NcclGather::Packed(const Order& order, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
  }
  if (!status.ok()) return Moved(order, std::move(status));
  options_.exchange->Move(order.generation, order.sequence, MovesOf(order),
                          absl::StrCat("gather ", NameOf(order.key.group), " version ", order.key.version),
                          [this, order](absl::Status moved) { Moved(order, std::move(moved)); });
}

void NcclGather::Moved(const Order& order, absl::Status status) {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  for (const NodeMove& of : MovesOf(order))
    (of.move.src != nullptr ? sent_bytes : received_bytes) += of.move.size_bytes;
  absl::MutexLock lock(&mutex_);
  --under_way_;
  const bool is_current = order.generation == generation_ && !failed_.has_value();
  if (order.slot >= 0) {
    Slot& slot = slots_[static_cast<size_t>(order.slot)];
    slot.filling = false;
    if (!status.ok() || !is_current) slot.key.reset();
  }
  if (status.ok()) {
    sent_bytes_ += sent_bytes;
    received_bytes_ += received_bytes;
  } else if (is_current) {
    FailLocked(status);
  }
  woken_ = true;
}

}  // namespace shardd
