#include "server/collective/nodes/nccl/nccl_gather.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/node_part.h"
#include "server/collective/local/fan_out.h"
#include "server/peer/peer_links.h"

namespace shardd {
namespace {

constexpr size_t kMaxOrders = 1 << 16;  // that have not begun: some 100 bytes each, and more than a step takes
constexpr size_t kMaxFailureBytes = 1024;

int64_t RoundUp(int64_t bytes) { return (bytes + kRailAlignmentBytes - 1) / kRailAlignmentBytes * kRailAlignmentBytes; }

}  // namespace

NcclGather::NcclGather(Options options)
    : options_(std::move(options)),
      node_(options_.node),
      nodes_(options_.plan->nodes()),
      row_nodes_(NodesOfRow(*options_.plan)),
      ranks_(options_.plan->world_size),
      groups_(static_cast<int>(options_.plan->groups.size())),
      up_(static_cast<size_t>(nodes_)) {
  for (int group = 0; group < groups_; ++group) {
    for (int place = 0; place < row_nodes_; ++place) {
      for (int rank = 0; rank < ranks_; ++rank) parts_.emplace_back(*options_.plan, group, place, rank);
    }
  }
  const GatherStaging& staging = options_.plan->memory.gather_staging;
  own_bytes_ = staging.own_bytes;
  slot_bytes_ = staging.slot_bytes;
  thread_ = std::thread([this] { Run(); });
}

NcclGather::~NcclGather() {
  {
    absl::MutexLock lock(&mutex_);
    FailLocked(absl::AbortedError("the job's gathers are closed"));
    stopping_ = true;
    woken_ = true;
  }
  options_.exchange->Begin(std::numeric_limits<uint64_t>::max());
  thread_.join();
}

char* NcclGather::At(int rank, int slot, int group, int node) const {
  int64_t offset = own_bytes_ + slot * slot_bytes_;
  for (int before = node - node % row_nodes_; before < node; ++before) {
    if (before != node_) offset += RoundUp(Part(group, before, rank).bytes());
  }
  return options_.staging[static_cast<size_t>(rank)] + offset;
}

void NcclGather::Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done) {
  const auto call = std::make_shared<Call>();
  call->key = {group, version};
  call->image = image;
  call->label = std::move(label);
  call->done = std::move(done);
  call->asked = MonotonicNow();
  options_.exchange->Begin(generation);
  absl::MutexLock lock(&mutex_);
  if (generation > generation_) AdvanceLocked(generation);
  calls_.push_back(call);
  if (const absl::Status status = CheckCallLocked(generation, call->key); !status.ok()) {
    EndLocked(call, status);
  } else {
    bool others_have_some = false;
    for (int node = 0; node < nodes_; ++node) {
      for (int rank = 0; rank < ranks_; ++rank) {
        others_have_some = others_have_some || (node != node_ && IsInRow(node) && Part(group, node, rank).bytes() > 0);
      }
    }
    if (!others_have_some) EndLocked(call, absl::OkStatus());
  }
  woken_ = true;
}

absl::Status NcclGather::CheckCallLocked(uint64_t generation, const Key& key) const {
  if (generation < generation_) {
    return absl::AbortedError(
        absl::StrCat("the attempt has ended (got generation ", generation, ", now ", generation_, ")"));
  }
  if (failed_.has_value()) return *failed_;
  if (!IsThere(key)) {
    return absl::InvalidArgumentError(absl::StrCat("no such group or version (got group ", key.group, " of version ",
                                                   key.version, ", want a group below ", groups_,
                                                   " and a version from 1)"));
  }
  if (key.version < readable_) {
    return absl::FailedPreconditionError(absl::StrCat("this node has version ", readable_, " now"));
  }
  for (int node = 0; node < nodes_; ++node) {
    if (node != node_ && !up_[static_cast<size_t>(node)]) {
      return absl::UnavailableError(absl::StrCat("there is no link to node ", node));
    }
  }
  return absl::OkStatus();
}

void NcclGather::SetReadable(uint64_t version) {
  absl::MutexLock lock(&mutex_);
  readable_ = 0;  // nothing further is packed
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !reading_; };
  mutex_.Await(absl::Condition(&idle));
  readable_ = version;
  if (version > 0) last_readable_ = version;
  woken_ = true;
}

void NcclGather::Begin(uint64_t generation) {
  options_.exchange->Begin(generation);  // what is under way there would wait for ever
  absl::MutexLock lock(&mutex_);
  if (generation > generation_) AdvanceLocked(generation);
}

void NcclGather::OnUp(int node) {
  absl::MutexLock lock(&mutex_);
  up_[static_cast<size_t>(node)] = true;
}

void NcclGather::OnDown(int node, const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  up_[static_cast<size_t>(node)] = false;
  if (touched_) FailLocked(absl::UnavailableError(absl::StrCat("node ", node, " is gone: ", why.message())));
}

void NcclGather::OnPull(int node, const v1::PeerMessage& message) {
  options_.exchange->Begin(message.generation());
  absl::MutexLock lock(&mutex_);
  if (message.generation() > generation_) AdvanceLocked(message.generation());
  if (message.generation() < generation_ || stopping_ || failed_.has_value()) return;
  touched_ = true;
  const v1::PeerMessage::Pull& pull = message.pull();
  const absl::Status status = pull.code() == 0 ? TakeLocked(node, pull) : FailureOf(node, pull);
  if (!status.ok()) FailLocked(status);
  woken_ = true;
}

absl::Status NcclGather::FailureOf(int node, const v1::PeerMessage::Pull& pull) {
  auto code = static_cast<absl::StatusCode>(pull.code());
  // ABORTED means that a generation has ended; this one has yet to end.
  const bool known = code > absl::StatusCode::kOk && code <= absl::StatusCode::kUnauthenticated;
  if (!known || code == absl::StatusCode::kAborted) code = absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat("node ", node, " gathers nothing more in this attempt: ", pull.message()));
}

absl::Status NcclGather::TakeLocked(int node, const v1::PeerMessage::Pull& pull) {
  const Key key{pull.group(), pull.version()};
  if (!IsThere(key)) {
    return absl::InvalidArgumentError(absl::StrCat("node ", node, " asks for no such group or version (got group ",
                                                   key.group, " of version ", key.version, ", want a group below ",
                                                   groups_, " and a version from 1)"));
  }
  if (node_ == 0) {
    if (asks_.size() >= static_cast<size_t>(2 * groups_ * nodes_)) {
      return absl::ResourceExhaustedError(absl::StrCat("node ", node, " asks for too much at a time"));
    }
    asks_.emplace_back(node, key);
    return absl::OkStatus();
  }
  if (orders_.size() >= kMaxOrders) {
    return absl::ResourceExhaustedError(absl::StrCat("node ", node, " is too far ahead with its orders of gathers (",
                                                     kMaxOrders, " have not begun here)"));
  }
  for (int i = 0; i < pull.receivers_size(); ++i) {
    if (pull.receivers(i) < (i == 0 ? 0 : pull.receivers(i - 1) + 1) || pull.receivers(i) >= nodes_) {
      return absl::InvalidArgumentError(absl::StrCat("an order for nodes that are not there, or not ascending (got ",
                                                     absl::StrJoin(pull.receivers(), ", "), ", want some of ", nodes_,
                                                     " nodes)"));
    }
  }
  if (node != 0 || pull.transfer() != next_order_) {
    return absl::InvalidArgumentError(absl::StrCat("not the next order of gathers (got ", pull.transfer(),
                                                   " from node ", node, ", want ", next_order_, " from node 0)"));
  }
  Order order{generation_, next_order_++, key, {pull.receivers().begin(), pull.receivers().end()}};
  if (Receives(order)) asked_.erase(key);
  orders_.push_back(std::move(order));
  return absl::OkStatus();
}

void NcclGather::AdvanceLocked(uint64_t generation) {
  FailLocked(absl::AbortedError("the nodes have begun another attempt"));
  generation_ = generation;
  failed_.reset();
  touched_ = false;
  next_order_ = 0;
}

void NcclGather::FailLocked(const absl::Status& why) {
  const bool is_news = !failed_.has_value();
  if (is_news) failed_ = why;
  for (const CallPtr& call : calls_) EndLocked(call, *failed_);
  asked_.clear();
  asks_.clear();
  outgoing_.clear();
  // The others may wait for this node, which perhaps has no gather of its own whose end the job would hear of.
  if (is_news && !absl::IsAborted(why)) TellLocked(why);
  orders_.clear();
  for (Slot& slot : slots_) slot.key.reset();
  woken_ = true;
}

void NcclGather::TellLocked(const absl::Status& why) {
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_pull()->set_code(static_cast<int>(why.code()));
  message.mutable_pull()->set_message(std::string(why.message().substr(0, kMaxFailureBytes)));
  for (int node = 0; node < nodes_; ++node) {
    if (node != node_ && (node == 0 || node_ == 0)) outgoing_.emplace_back(node, message);
  }
}

void NcclGather::EndLocked(const CallPtr& call, const absl::Status& why) {
  if (call->ended.has_value()) return;
  call->ended = why.ok() ? why
                         : absl::Status(why.code(),
                                        absl::StrCat("gather \"", call->label, "\" from other nodes: ", why.message()));
  woken_ = true;
}

std::string NcclGather::Overdue(absl::Time now, absl::Duration limit) const {
  absl::MutexLock lock(&mutex_);
  for (const CallPtr& call : calls_) {
    if (call->ended.has_value() || now - call->asked <= limit) continue;
    return absl::StrCat(asked_.contains(call->key) ? "node 0 has not said when the nodes gather group \""
                                                   : "the other nodes have not sent their parts of group \"",
                        NameOf(call->key.group), "\" of version ", call->key.version, " for ",
                        absl::FormatDuration(absl::Trunc(now - call->asked, absl::Milliseconds(100))));
  }
  return "";
}

std::string NcclGather::Describe() const {
  absl::MutexLock lock(&mutex_);
  return absl::StrCat("parameters of ", nodes_, " nodes by nccl: ", received_bytes_, " bytes gathered, ", sent_bytes_,
                      " sent, ", calls_.size(), " groups on their way here",
                      readable_ == 0 ? "; nothing may be read now" : "");
}

}  // namespace shardd
