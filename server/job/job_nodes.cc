// A job that spans several nodes: what it says to node 0, and what comes back (node_member.h). Everything here happens
// between what ranks of this node do, which the other files know, and what other nodes do, which they do not.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/multinode/value_digest.h"

namespace shardd {
namespace {

constexpr int64_t kReadPieceBytes = int64_t{1} << 20;

std::string NoBits(size_t bits) {
  return std::string(static_cast<size_t>(MaskBytes(static_cast<int64_t>(bits))), '\0');
}
void SetBit(std::string* mask, size_t bit) {
  SetMaskBit(reinterpret_cast<uint8_t*>(mask->data()), static_cast<int64_t>(bit), true);
}
// Of a mask that node 0 has passed on, which has checked its size.
bool HasBit(const std::string& mask, size_t bit) {
  return bit / 8 < mask.size() && MaskBit(reinterpret_cast<const uint8_t*>(mask.data()), static_cast<int64_t>(bit));
}

}  // namespace

void JobCore::StartNodes() {
  if (nodes_ != nullptr) {
    nodes_->Start();
  }
}

// Sums --------------------------------------------------------------------------------------------------------------

void JobCore::SayReady(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  FollowHolders(key, pair, ranks);
  const size_t params = plan_->groups[key.second].params.size();
  v1::PeerMessage::Ready ready;
  ready.mutable_key()->set_step(committed_step_ + 1);
  ready.mutable_key()->set_backward(key.first);
  ready.mutable_key()->set_group(key.second);
  ready.mutable_key()->set_occurrence(pair.occurrence);
  std::string& present = *ready.mutable_gives()->mutable_present();
  std::string& fresh = *ready.mutable_gives()->mutable_fresh();
  present = fresh = NoBits(params);
  for (size_t i = 0; i < params; ++i) {
    for (int rank : ranks) {
      const Contribution& contribution = pair.waiting[rank].front();
      if (contribution.present[i]) {
        SetBit(&present, i);
        if (contribution.fresh[i]) SetBit(&fresh, i);
      }
    }
  }
  pair.said = true;
  nodes_->Ready(std::move(ready));
}

bool JobCore::AwaitsNodes() const {
  return nodes_ != nullptr &&
         std::any_of(pairs_.begin(), pairs_.end(), [](const auto& entry) { return entry.second.said; });
}

void JobCore::NodeGo(const v1::PeerMessage::Go& go) {
  const int group = go.key().group();
  const int backward = go.key().backward();
  if (closed_ || committing_ || go.key().step() != committed_step_ + 1 || group < 0 ||
      group >= static_cast<int>(plan_->groups.size()) || go.gives_size() != plan_->nodes()) {
    return;
  }
  const PairKey key(backward, group);
  Pair& pair = GetPair(key);
  std::vector<int> ranks;
  const bool own = pair.said && go.key().occurrence() == pair.occurrence;
  for (int rank = 0; own && rank < world_size(); ++rank) {
    if (!pair.waiting[rank].empty()) {
      ranks.push_back(rank);
    }
  }
  const size_t params = plan_->groups[group].params.size();
  OfOthers others;
  others.sequence = go.sequence();
  others.present.assign(params, false);
  others.fresh.assign(params, false);
  absl::Status status;
  for (size_t i = 0; i < params; ++i) {
    int fresh_node = -1;
    int adding_node = -1;
    const auto hear = [&](const auto& counts) {
      for (int node = 0; node < go.gives_size(); ++node) {
        if (HasBit(go.gives(node).present(), i) && counts(node)) {
          (HasBit(go.gives(node).fresh(), i) ? fresh_node : adding_node) = node;
        }
      }
    };
    hear([](int) { return true; });
    if (fresh_node >= 0 && adding_node >= 0 && plan_->cut_over_nodes) {
      // As ranks of one node: who holds nothing of it cannot tell.
      const int either = fresh_node;
      fresh_node = adding_node = -1;
      hear([&](int node) { return NodeRangeOf(*plan_, plan_->groups[group].params[i], node).numel > 0; });
      if (fresh_node < 0 && adding_node < 0) fresh_node = either;
    }
    if (fresh_node >= 0 && adding_node >= 0) {
      status = absl::FailedPreconditionError(absl::StrCat(
          "SubmitGradients group \"", group_name(group), "\": gradient of \"",
          plan_->params[plan_->groups[group].params[i]].fqn, "\" replaces on node ", fresh_node, " and adds on node ",
          adding_node, "; all nodes must do the same (step=", committed_step_ + 1, ")"));
    }
    others.present[i] = fresh_node >= 0 || adding_node >= 0;
    others.fresh[i] = fresh_node >= 0;
  }
  const uint64_t epoch = epoch_;
  if (status.ok()) {
    gradients_seen_ = true;
    status = IssueReduce(key, pair, ranks, &others);
  }
  if (status.ok() && epoch == epoch_) {
    if (own) {
      pair.said = false;
      ++pair.occurrence;
    }
    pair.touched.assign(pair.touched.size(), 0);
    status = TryReduce(key);
    ForgetIfClosed(key);
    MaybeSayClosed();
  }
  if (!status.ok() && epoch == epoch_) {
    Abort(std::move(status), {});
  }
}

// Node 0 takes it that what was not said of these backwards by then never will be.
void JobCore::MaybeSayClosed() {
  if (nodes_ == nullptr) {
    return;
  }
  int closed = kAllBackwards;
  for (const RankStep& rank : ranks_) {
    closed = std::min(closed, rank.closed_backwards);
  }
  if (closed <= said_closed_) {
    return;
  }
  for (const auto& [key, pair] : pairs_) {
    const size_t said = pair.said ? 1 : 0;
    for (int rank = 0; key.first < closed && rank < world_size(); ++rank) {
      if (pair.waiting[rank].size() > said) {
        return;  // said behind the one that is under way
      }
    }
  }
  said_closed_ = closed;
  v1::PeerMessage::Closed message;
  message.set_step(committed_step_ + 1);
  message.set_backwards(closed);
  if (closed == kAllBackwards) {
    *message.mutable_ranks_step() = ranks_[0].step;
    message.mutable_ranks_step()->clear_trainer_state();
  }
  nodes_->Closed(std::move(message));
}

void JobCore::NodesClosed(int backwards) {
  nodes_closed_ = backwards;
  PublishReduced();
  const uint64_t epoch = epoch_;
  absl::Status status = MaybeDecide();
  if (status.ok() && epoch == epoch_) {
    status = MaybeGrantFullParams();
  }
  if (!status.ok() && epoch == epoch_) {
    Abort(std::move(status), {});
  }
}

// The step ----------------------------------------------------------------------------------------------------------

void JobCore::SayReduced() {
  v1::PeerMessage::Reduced reduced;
  reduced.set_step(committed_step_ + 1);
  *reduced.mutable_present() = NoBits(present_.size());
  for (size_t i = 0; i < present_.size(); ++i) {
    if (present_[i]) SetBit(reduced.mutable_present(), i);
  }
  reduced.set_norm_scale(own_norm_.state().scale);
  reduced.set_norm_sum(own_norm_.state().sum);
  if (compared_version_ == version_) {
    reduced.mutable_digests()->Add(value_digests_.begin(), value_digests_.end());
  }
  nodes_->Reduced(std::move(reduced));
}

// Digests go with the next step (SayReduced), which is not decided before they are there.
void JobCore::CompareReplicasIfDue() {
  if (nodes_ == nullptr || plan_->cut_over_nodes || committed_step_ % plan_->config.compare_every() != 0) {
    return;
  }
  ++digests_under_way_;
  node_worker_->Post([self = shared_from_this(), counts = step_counts_, version = version_, epoch = epoch_] {
    auto values = std::make_shared<v1::PeerMessage::Values>();
    const absl::Status status = self->ReadValues(counts, values.get());
    self->loop_->Post([self, status, values, version, epoch] {
      --self->digests_under_way_;
      if (self->closed_) {
        return;
      }
      if (status.ok()) {
        self->compared_version_ = version;
        self->value_digests_.assign(values->digests().begin(), values->digests().end());
      }
      const absl::Status decided = status.ok() ? self->MaybeDecide() : status;
      if (!decided.ok() && self->epoch_ == epoch) {
        self->Abort(decided, {});
      }
    });
  });
}

void JobCore::NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) {
  if (!plan_->cut_over_nodes) {
    Apply(own_norm_.value());  // all nodes have the same gradients
    return;
  }
  const std::string present = PresentOnHolders(reduced);
  for (size_t i = 0; i < present_.size(); ++i) present_[i] = HasBit(present, i);
  Norm total(own_norm_.order());
  for (const v1::PeerMessage::Reduced& of_node : reduced) {
    Norm part(total.order());
    part.set_state({of_node.norm_scale(), of_node.norm_sum()});
    total.Add(part);
  }
  Apply(total.value());
}

void JobCore::NodeDecided(const v1::PeerMessage::Decided& decided) {
  for (size_t i = 0; plan_->cut_over_nodes && i < present_.size(); ++i) present_[i] = HasBit(decided.present(), i);
  skipped_ = decided.skipped();
  grad_norm_ = decided.grad_norm();
  clip_factor_ = decided.clip_factor();
  ApplyDecided();
}

// Initial values ----------------------------------------------------------------------------------------------------

absl::Status JobCore::ReadValues(const std::vector<int64_t>& step_counts, v1::PeerMessage::Values* values) const {
  std::string piece;
  for (size_t p = 0; p < plan_->params.size(); ++p) {
    if (plan_->cut_over_nodes) {
      // Each node has its own part, but of the updates of a parameter all count the same. 0: it has nothing of it.
      ValueDigest counts;
      counts.AddWord(static_cast<uint64_t>(step_counts[p]));
      values->add_digests(HeldOf(static_cast<int>(p)).numel > 0 ? counts.value() | 1 : 0);
      continue;
    }
    const ParamPlan& param = plan_->params[p];
    ValueDigest digest;
    for (int what = 0; what <= plan_->optimizer_states; ++what) {
      const Written written = WrittenPart(param, what);
      const int64_t bytes = written.slab == nullptr ? 0 : param.numel * written.element_bytes;
      for (int64_t at = 0; at < bytes; at += kReadPieceBytes) {
        piece.resize(static_cast<size_t>(std::min(kReadPieceBytes, bytes - at)));
        SHARDD_RETURN_IF_ERROR(
            written.slab->Read(written.offset_bytes + at, piece.data(), static_cast<int64_t>(piece.size())));
        digest.Add(piece.data(), piece.size());
      }
    }
    digest.AddWord(static_cast<uint64_t>(step_counts[p]));
    values->add_digests(digest.value());
  }
  return absl::OkStatus();
}

// Off the loop: it takes as long as reading all of the model does.
void JobCore::SayValues() {
  reading_values_ = true;
  node_worker_->Post([self = shared_from_this(), stale = StaleValues(), counts = step_counts_, epoch = epoch_] {
    absl::Status status;
    for (const auto& [written, numel] : stale) {
      if (status.ok()) status = Clear(written, numel);
    }
    auto values = std::make_shared<v1::PeerMessage::Values>();
    if (status.ok()) status = self->ReadValues(counts, values.get());
    self->loop_->Post([self, status, values, epoch] {
      self->reading_values_ = false;
      if (self->closed_ || self->epoch_ != epoch) {
        return;
      }
      if (!status.ok()) {
        self->Abort(status, {});
        return;
      }
      self->nodes_->Values(std::move(*values));
    });
  });
}

void JobCore::NodeValuesAgreed() {
  if (absl::Status status = CommitValues(); !status.ok()) {
    Close(absl::StrCat("commit of initial values: ", status.message()));  // other nodes have them
  }
}

// Attempts ----------------------------------------------------------------------------------------------------------

void JobCore::NodeAbort(const absl::Status& cause) {
  if (pending_abort_.has_value() && !committing_) {
    auto [own, lost] = *std::move(pending_abort_);
    pending_abort_.reset();
    Abort(std::move(own), std::move(lost));
    return;
  }
  Abort(cause, {});
}

void JobCore::NodeGeneration(uint64_t generation) {
  node_sums_->Begin(generation);
  if (node_gather_ == nullptr) {
    return;
  }
  gather_generation_ = generation;
  node_gather_->Begin(generation);
  GatherAgain();
}

void JobCore::NodeClose(const std::string& why) { Close(why); }

}  // namespace shardd
