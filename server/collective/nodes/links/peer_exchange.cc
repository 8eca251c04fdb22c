#include "server/collective/nodes/links/peer_exchange.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "common/tensor/kernels.h"
#include "server/collective/nodes/links/peer_sum.h"
#include "server/peer/peer_links.h"

namespace shardd {
namespace {

constexpr int64_t kMaxUnsentBytes = int64_t{4} << 20;  // per node
constexpr int64_t kChunkNumel = PeerLinks::kMaxDataBytes / int64_t{sizeof(float)};
constexpr int64_t kAddNumel = 4096;  // fits L1: a destination is one of its sources, and these must not overlap

}  // namespace

absl::StatusOr<std::unique_ptr<PeerExchange>> PeerExchange::Make(PeerLinks* links, int64_t max_numel, int slots,
                                                                 int64_t max_piece_numel, int places) {
  const int64_t slot_numel = std::max(max_piece_numel, PieceCut{max_numel, links->nodes()}.PieceNumel());
  const size_t bytes = static_cast<size_t>(slots * (links->nodes() - 1) * slot_numel) * sizeof(float);
  Memory memory(static_cast<float*>(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64))), &std::free);
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("add over nodes: no memory for what ", links->nodes() - 1,
                                                     " other node(s) send (want ", bytes,
                                                     " bytes); give the daemon more memory"));
  }
  return absl::WrapUnique(new PeerExchange(links, max_numel, slots, slot_numel, places, std::move(memory)));
}

PeerExchange::PeerExchange(PeerLinks* links, int64_t max_numel, int slots, int64_t slot_numel, int places,
                           Memory memory)
    : links_(links),
      node_(links->node()),
      nodes_(links->nodes()),
      places_(places == 0 ? nodes_ : places),
      max_numel_(max_numel),
      slot_count_(slots),
      slot_numel_(slot_numel),
      memory_(std::move(memory)),
      slots_(slots),
      peers_(nodes_) {
  thread_ = std::thread([this] { Run(); });
}

PeerExchange::~PeerExchange() {
  {
    absl::MutexLock lock(&mutex_);
    FailLocked(absl::AbortedError("the exchange is closed"));
    stopping_ = true;
  }
  thread_.join();
}

std::string PeerExchange::Describe() const {
  return absl::StrCat("peers: sums over ", nodes_, " nodes by the daemons' connections, in memory of the host");
}

float* PeerExchange::Received(uint64_t sequence, int node) const {
  const int64_t place = static_cast<int64_t>(sequence % slot_count_) * (nodes_ - 1) + (node < node_ ? node : node - 1);
  return memory_.get() + place * slot_numel_;
}

void PeerExchange::AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                             Done done) {
  Enter(generation, std::make_shared<Sum>(sequence, nodes_, places_, /*scattered=*/false, std::move(parts),
                                          std::move(label), std::move(done)));
}

void PeerExchange::ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                                 Done done) {
  Enter(generation, std::make_shared<Sum>(sequence, nodes_, places_, /*scattered=*/true, std::move(parts),
                                          std::move(label), std::move(done)));
}

void PeerExchange::Enter(uint64_t generation, SumPtr sum) {
  const uint64_t sequence = sum->sequence;
  const auto text = [&](const auto&... why) { return absl::StrCat("add \"", sum->label, "\" over nodes: ", why...); };
  absl::MutexLock lock(&mutex_);
  woken_ = true;
  if (generation > generation_) {
    AdvanceLocked(generation, absl::AbortedError("the nodes have begun another attempt"));
  }
  absl::Status refused;
  if (generation < generation_) {
    refused =
        absl::AbortedError(text("the attempt has ended (got generation ", generation, ", now ", generation_, ")"));
  } else if (failed_.has_value()) {
    refused = absl::Status(failed_->code(), text(failed_->message()));
  } else if (sequence != next_) {
    refused = absl::InvalidArgumentError(text("sums begin in their order (got ", sequence, ", want ", next_, ")"));
  } else if (sum->cut.numel > max_numel_ || sum->cut.numel <= 0) {
    refused =
        absl::InvalidArgumentError(text("numel out of range (got ", sum->cut.numel, ", want 1 to ", max_numel_, ")"));
  } else if (sum->cut.Numel(node_) > slot_numel_) {
    refused = absl::InvalidArgumentError(text("numel of this node's piece out of range (got ", sum->cut.Numel(node_),
                                              ", want at most ", slot_numel_, ")"));
  } else if (!std::is_sorted(sum->parts.begin(), sum->parts.end(),
                             [](const NodePart& a, const NodePart& b) { return a.node < b.node; }) ||
             (sum->cut.scattered && (sum->parts.front().node < 0 || sum->parts.back().node >= places_))) {
    refused = absl::InvalidArgumentError(
        text("parts are not those of nodes of a row in their order (want 0 to ", places_ - 1, ", ascending)"));
  }
  if (!refused.ok()) {
    sum->ended = std::move(refused);
    ended_.push_back(std::move(sum));
    return;
  }
  ++next_;
  sums_.emplace(sequence, std::move(sum));
}

void PeerExchange::Begin(uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  if (generation > generation_) {
    AdvanceLocked(generation, absl::AbortedError("the nodes have begun another attempt"));
  }
}

void PeerExchange::OnDown(int node, const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  // A lost link that nobody needs, as before all nodes are connected, ends nothing.
  if (!sums_.empty() || peers_[node].touched) {
    FailLocked(absl::UnavailableError(absl::StrCat("node ", node, " is gone: ", why.message())));
  }
}

void PeerExchange::AdvanceLocked(uint64_t generation, const absl::Status& why) {
  EndSumsLocked(why);
  generation_ = generation;
  next_ = 0;
  failed_.reset();
  for (Slot& slot : slots_) {
    slot = {};
  }
  for (Peer& peer : peers_) {
    peer.touched = false;
  }
}

void PeerExchange::FailLocked(const absl::Status& why) {
  if (!failed_.has_value()) {
    failed_ = why;
  }
  EndSumsLocked(*failed_);
}

void PeerExchange::EndSumsLocked(const absl::Status& why) {
  for (auto& [sequence, sum] : sums_) {
    sum->ended = absl::Status(why.code(), absl::StrCat("add \"", sum->label, "\" over nodes: ", why.message()));
    ended_.push_back(sum);
  }
  sums_.clear();
  for (Peer& peer : peers_) {
    peer.queue.clear();
  }
  woken_ = true;
}

void PeerExchange::Run() {
  absl::MutexLock lock(&mutex_);
  const auto awake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return woken_ || stopping_; };
  for (;;) {
    mutex_.Await(absl::Condition(&awake));
    woken_ = false;
    // Sending comes first, because others wait for it. Adds one chunk at a time, to look again in between.
    while (FinishOne() || StartOne() || SendOne() || AddOne()) {
    }
    if (stopping_ && ended_.empty()) {
      return;
    }
    if (stopping_ && !woken_) {  // waits for what the links still use
      const auto more = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return woken_; };
      mutex_.Await(absl::Condition(&more));
    }
  }
}

PeerExchange::SumPtr PeerExchange::TakeFinishedLocked() {
  const auto found = std::find_if(ended_.begin(), ended_.end(), [](const SumPtr& sum) { return sum->users == 0; });
  if (found == ended_.end()) {
    return nullptr;
  }
  SumPtr sum = std::move(*found);
  ended_.erase(found);
  return sum;
}

bool PeerExchange::FinishOne() {
  for (const auto& [sequence, sum] : sums_) {
    if (sum->started && sum->IsThere(node_) && sum->queued == 0 && sum->users == 0) {
      sum->ended = absl::OkStatus();
      ended_.push_back(sum);
      sums_.erase(sequence);
      break;
    }
  }
  const SumPtr sum = TakeFinishedLocked();
  if (sum == nullptr) {
    return false;
  }
  mutex_.Unlock();
  std::exchange(sum->done, nullptr)(*sum->ended);
  mutex_.Lock();
  return true;
}

bool PeerExchange::StartOne() {
  for (auto& [sequence, sum] : sums_) {
    if (sequence >= sums_.begin()->first + static_cast<uint64_t>(slot_count_)) {
      return false;
    }
    if (sum->started) {
      continue;
    }
    sum->started = true;
    const int64_t slot_numel = sum->cut.scattered ? sum->cut.Numel(node_) : sum->cut.numel;
    if (absl::StatusOr<Slot*> slot = SlotLocked(sequence, slot_numel, sum->cut.scattered); !slot.ok()) {
      FailLocked(slot.status());
      return true;
    }
    for (int step = 1; step < nodes_; ++step) {  // each node begins with another one
      const int piece = (node_ + step) % nodes_;
      for (int64_t at = sum->cut.Begin(piece); at < sum->cut.End(piece);) {
        const int64_t numel = std::min(sum->Contiguous(at, sum->cut.End(piece)), kChunkNumel);
        peers_[piece].queue.push_back({sum, at, numel, /*is_sum=*/false});
        ++sum->queued;
        at += numel;
      }
    }
    return true;
  }
  return false;
}

bool PeerExchange::SendOne() {
  for (int turn = 0; turn < nodes_; ++turn) {
    const int node = static_cast<int>(next_peer_++ % nodes_);
    Peer& peer = peers_[node];
    if (peer.queue.empty() || peer.unsent_bytes >= kMaxUnsentBytes) {
      continue;
    }
    const Outgoing next = std::move(peer.queue.front());
    peer.queue.pop_front();
    const int64_t bytes = next.numel * int64_t{sizeof(float)};
    peer.touched = true;
    peer.unsent_bytes += bytes;
    --next.sum->queued;
    ++next.sum->users;
    v1::PeerData header;
    header.set_generation(generation_);
    header.set_sequence(next.sum->sequence);
    header.set_is_sum(next.is_sum);
    const SumPieces& cut = next.sum->cut;
    header.set_scattered(cut.scattered);
    const int piece = next.is_sum ? node_ : node;  // that it belongs to
    const bool reports = next.is_sum && !HasOwnPlace(node);
    header.set_offset(!cut.scattered ? next.offset : reports ? 0 : next.offset - cut.Begin(piece));
    header.set_numel(!cut.scattered ? cut.numel : reports ? next.numel : cut.Numel(piece));
    const char* elements = reinterpret_cast<const char*>(next.sum->At(next.offset));
    mutex_.Unlock();
    links_->SendData(node, header, absl::string_view(elements, static_cast<size_t>(bytes)),
                     [this, node, bytes, sum = next.sum](const absl::Status& status) {
                       absl::MutexLock lock(&mutex_);
                       woken_ = true;
                       peers_[node].unsent_bytes -= bytes;
                       --sum->users;
                       if (sum->ended.has_value() && !sum->ended->ok()) {
                         return;  // of a generation that is over
                       }
                       if (!status.ok()) {
                         FailLocked(absl::UnavailableError(
                             absl::StrCat("node ", node, " cannot be sent gradients: ", status.message())));
                       }
                     });
    mutex_.Lock();
    return true;
  }
  return false;
}

bool PeerExchange::AddOne() {
  for (auto& [sequence, sum] : sums_) {
    Slot& slot = slots_[sequence % slot_count_];
    const int64_t mine = sum->cut.Numel(node_);
    if (!sum->started || sum->added == mine) {
      continue;
    }
    int64_t ready = mine;  // available from all others
    for (int node = 0; node < nodes_; ++node) {
      ready = node == node_ ? ready : std::min(ready, slot.received[node]);
    }
    if (ready <= sum->added) {
      continue;
    }
    const SumPtr owned = sum;
    const int64_t from = owned->added;
    const int64_t at = owned->cut.Begin(node_) + from;
    const int64_t numel = std::min(owned->Contiguous(at, owned->cut.Begin(node_) + ready), kChunkNumel);
    ++owned->users;
    mutex_.Unlock();
    alignas(64) float block[kAddNumel];
    std::vector<const void*> sources(nodes_);
    for (int64_t first = 0; first < numel; first += kAddNumel) {
      const int64_t count = std::min(kAddNumel, numel - first);
      float* own = owned->At(at) + first;
      for (int node = 0; node < nodes_; ++node) {
        sources[node] = node == node_ ? own : Received(owned->sequence, node) + from + first;
      }
      ReduceSources(sources, v1::DTYPE_FLOAT32, v1::DTYPE_FLOAT32, v1::DTYPE_FLOAT32, 1.0f, /*accumulate=*/false, block,
                    count);
      std::copy_n(block, count, own);
    }
    mutex_.Lock();
    --owned->users;
    if (owned->ended.has_value()) {
      return true;
    }
    owned->added += numel;
    owned->summed += numel;
    slots_[owned->sequence % slot_count_].added = owned->added == mine;
    QueueAddedLocked(owned, at, numel);
    return true;
  }
  return false;
}

void PeerExchange::QueueAddedLocked(const SumPtr& sum, int64_t offset, int64_t numel) {
  for (int step = 1; step < nodes_; ++step) {
    const int node = (node_ + step) % nodes_;
    const bool reports = sum->cut.scattered && !HasOwnPlace(node);
    if (reports && sum->added < sum->cut.Numel(node_)) {
      continue;
    }
    // A report has one element, because what links send cannot be empty.
    peers_[node].queue.push_back({sum, offset, reports ? 1 : numel, /*is_sum=*/true});
    ++sum->queued;
  }
}

}  // namespace shardd
