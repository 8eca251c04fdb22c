#include "tests/faults/peer_daemon.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "common/plan/node_part.h"
#include "tests/testing/grpc_process.h"
#include "tests/testing/poll.h"

namespace shardd::faults {

using testing::PollUntil;

PeerDaemon::PeerDaemon(const v1::JobSpec& spec, const std::vector<std::string>& addresses)
    : plan_(*PlanShards(spec)), zeros_(static_cast<size_t>(PeerLinks::kMaxDataBytes)) {
  testing::KeepGrpc();
  PeerNetwork::Options options;
  options.listen = "127.0.0.1:0";  // nobody calls: the higher number does
  network_ = *PeerNetwork::Create(options);
  auto links = *network_->Join(
      {.job = spec.name(), .uid = geteuid(), .node = 1, .addresses = addresses, .spec = spec.SerializeAsString()},
      this);
  absl::MutexLock lock(&mutex_);
  links_ = std::move(links);
  use_ = links_.get();
}

PeerDaemon::~PeerDaemon() { links_.reset(); }

void PeerDaemon::OnUp(int node) {
  const auto joined = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return use_ != nullptr; };
  absl::MutexLock lock(&mutex_, absl::Condition(&joined));
  v1::PeerMessage message;
  message.mutable_holds();
  use_->Send(node, std::move(message));
}

void PeerDaemon::OnMessage(int node, v1::PeerMessage message, PeerReceipt /*receipt*/) {
  absl::MutexLock lock(&mutex_);
  if (message.has_begin()) {
    generation_ = message.begin().generation();
    v1::PeerMessage values;
    values.set_generation(generation_);
    for (size_t i = 0; i < plan_.params.size(); ++i) values.mutable_values()->add_digests(0);
    if (!message.begin().initialized()) use_->Send(node, std::move(values));
  }
  heard_.push_back(std::move(message));
}

void PeerDaemon::OnData(int, const v1::PeerData& header, absl::string_view elements) {
  absl::MutexLock lock(&mutex_);
  data_.push_back(header);
  data_.back().set_numel(static_cast<int64_t>(elements.size()));
}

bool PeerDaemon::WaitAsked(int64_t bytes, v1::PeerMessage* pull) {
  const auto next = [pull](const v1::PeerMessage& message) {
    return message.has_pull() && message.pull().transfer() > pull->pull().transfer();
  };
  const auto asked = [&] {
    absl::MutexLock lock(&mutex_);
    const auto found = std::find_if(heard_.begin(), heard_.end(), next);
    if (found == heard_.end()) return false;
    *pull = *found;
    return true;
  };
  while (PollUntil(asked)) {
    const int64_t held = HeldBytes(pull->pull().group(), 1);
    if (held >= bytes) return true;
    SendData(*pull, 0, held);
  }
  return false;
}

bool PeerDaemon::Refused(uint64_t transfer, std::string* why) const {
  absl::MutexLock lock(&mutex_);
  for (const v1::PeerMessage& message : heard_) {
    if (message.has_pull() && message.pull().code() != 0 && message.pull().transfer() == transfer) {
      *why = message.pull().message();
      return true;
    }
  }
  return false;
}

bool PeerDaemon::WaitRefused(uint64_t transfer, std::string* why) {
  return PollUntil([&] { return Refused(transfer, why); });
}

bool PeerDaemon::WaitData(uint64_t transfer, int64_t bytes) {
  return PollUntil([&] {
    absl::MutexLock lock(&mutex_);
    int64_t got = 0;
    for (const v1::PeerData& data : data_) got += data.sequence() == transfer ? data.numel() : 0;
    return got == bytes;
  });
}

bool PeerDaemon::WaitSaid(const std::function<bool(const v1::PeerMessage&)>& is_it) {
  return PollUntil([&] {
    absl::MutexLock lock(&mutex_);
    return std::any_of(heard_.begin(), heard_.end(), is_it);
  });
}

uint64_t PeerDaemon::generation() const {
  absl::MutexLock lock(&mutex_);
  return generation_;
}

int64_t PeerDaemon::HeldBytes(int group, int node) const {
  int64_t bytes = 0;
  for (const FlatRange& range : NodeRanges(plan_, group, node)) {
    bytes += range.numel * DTypeSizeBytes(plan_.flat_params[static_cast<size_t>(range.flat_param)].unsharded_dtype);
  }
  return bytes;
}

void PeerDaemon::SendData(const v1::PeerMessage& pull, int64_t offset, int64_t bytes,
                          const std::function<void(v1::PeerData*)>& change) {
  v1::PeerData header;
  header.set_generation(pull.generation());
  header.set_sequence(pull.pull().transfer());
  header.set_slab(v1::SLAB_UNSHARDED);
  header.set_offset(offset);
  header.set_numel(HeldBytes(pull.pull().group(), 1));
  if (change != nullptr) change(&header);
  links_->SendData(0, header, absl::string_view(zeros_.data(), static_cast<size_t>(bytes)), [](const absl::Status&) {});
}

v1::PeerMessage PeerDaemon::Pull(uint64_t transfer, int group, uint64_t version) const {
  v1::PeerMessage message;
  message.set_generation(generation());
  message.mutable_pull()->set_transfer(transfer);
  message.mutable_pull()->set_group(group);
  message.mutable_pull()->set_version(version);
  return message;
}

}  // namespace shardd::faults
