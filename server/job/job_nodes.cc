// A job that spans several nodes: what it says to node 0, and what comes back (node_member.h). Everything here happens
// between what ranks of this node do, which the other files know, and what other nodes do, which they do not.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/multinode/param_mask.h"
#include "server/multinode/value_digest.h"

namespace shardd {
namespace {

constexpr int64_t kReadPieceBytes = int64_t{1} << 20;

}  // namespace

void JobCore::StartNodes() {
  if (nodes_ != nullptr) {
    nodes_->member().Start();
  }
}

// Sums --------------------------------------------------------------------------------------------------------------

void JobCore::NodeGo(const v1::PeerMessage::Go& go) {
  const int group = go.key().group();
  const int backward = go.key().backward();
  if (closed_ || commits_.decision().committing() || go.key().step() != committed_.step() + 1 || group < 0 ||
      group >= static_cast<int>(plan_->groups.size()) || go.gives_size() != plan_->nodes()) {
    return;
  }
  absl::StatusOr<GivenGradients> given = GivenByAll(*plan_, go);
  absl::Status status = given.status();
  const uint64_t epoch = committed_.epoch();
  if (status.ok()) {
    status = gradients_.reductions().AddGiven({backward, group}, go.key().occurrence(), *given);
  }
  if (!status.ok() && epoch == committed_.epoch()) {
    Abort(std::move(status), {});
  }
}

// How many backwards are closed here, where node 0 is to be told; else 0.
int JobCore::ClosedToSay() const {
  const int closed = gradients_.pairing().ClosedToSay();
  return closed <= nodes_->said_closed() ? 0 : closed;
}

void JobCore::SayClosed() { nodes_->SayClosed(committed_.step() + 1, ClosedToSay(), commits_.steps().step(0)); }

void JobCore::NodesClosed(int backwards) { nodes_->HearClosed(backwards); }

// The step ----------------------------------------------------------------------------------------------------------

// The decision is journaled here, and shards are about to change.
void JobCore::SayDecided() {
  if (nodes_->member().node() == 0) {
    v1::PeerMessage::Decided decided;
    commits_.decision().Describe(&decided);
    decided.set_step(committed_.step() + 1);
    if (plan_->cut_over_nodes) {
      decided.set_present(MaskOf(gradients_.presence().by_param()));
    }
    nodes_->member().Decide(decided);
  }
  nodes_->member().Holding(committed_.step() + 1);  // before the update, which takes longer than all nodes' answers
  SetReadable(0);
}

// Digests go with the next step (JobNodes::SayReduced), which is not decided before they are there.
void JobCore::CompareReplicasIfDue() {
  if (nodes_ == nullptr || plan_->cut_over_nodes || committed_.step() % plan_->config.compare_every() != 0) {
    return;
  }
  nodes_->digests().Begin();
  nodes_->worker()->Post([self = shared_from_this(), counts = committed_.step_counts(), version = committed_.version(),
                          epoch = committed_.epoch()] {
    auto values = std::make_shared<v1::PeerMessage::Values>();
    const absl::Status status = self->ReadValues(counts, values.get());
    self->loop_->Post([self, status, values, version, epoch] {
      ReplicaDigests& digests = self->nodes_->digests();
      status.ok() ? digests.Taken(version, {values->digests().begin(), values->digests().end()}) : digests.Failed();
      if (self->closed_) {
        return;
      }
      if (!status.ok() && self->committed_.epoch() == epoch) {
        self->Abort(status, {});
      }
      self->Advance();
    });
  });
}

void JobCore::NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) {
  if (!plan_->cut_over_nodes) {
    commits_.Measured(nodes_->own_norm().value());  // all nodes have the same gradients
    return;
  }
  gradients_.presence().SetAll(PresentOnHolders(*plan_, reduced));
  commits_.Measured(NormOverNodes(nodes_->own_norm().order(), reduced).value());
}

void JobCore::NodeDecided(const v1::PeerMessage::Decided& decided) {
  if (plan_->cut_over_nodes) gradients_.presence().SetAll(BitsOf(decided.present(), plan_->params.size()));
  commits_.Heard(decided);
}

// Initial values ----------------------------------------------------------------------------------------------------

absl::Status JobCore::ReadValues(const std::vector<int64_t>& step_counts, v1::PeerMessage::Values* values) const {
  std::string piece;
  for (size_t p = 0; p < plan_->params.size(); ++p) {
    if (plan_->cut_over_nodes) {
      // Each node has its own part, but of the updates of a parameter all count the same. 0: it has nothing of it.
      ValueDigest counts;
      counts.AddWord(static_cast<uint64_t>(step_counts[p]));
      values->add_digests(ElementsOfNode(*plan_, static_cast<int>(p)).numel > 0 ? counts.value() | 1 : 0);
      continue;
    }
    ValueDigest digest;
    for (int what = 0; what <= plan_->optimizer_states; ++what) {
      const SlabPart written = WholePart(*plan_, *memory_, static_cast<int>(p), what);
      const int64_t bytes = written.size_bytes();
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

void JobCore::CommitValues() {
  if (nodes_ == nullptr) {
    values_.Commit();
    return;
  }
  values_.BeginSaying();
  // Off the loop: it takes as long as reading all of the model does.
  nodes_->worker()->Post([self = shared_from_this(), stale = values_.StaleParts(), counts = committed_.step_counts(),
                          epoch = committed_.epoch()] {
    absl::Status status;
    for (SlabPart part : stale) {
      while (status.ok() && part.numel > 0) status = part.ClearSome();
    }
    auto values = std::make_shared<v1::PeerMessage::Values>();
    if (status.ok()) status = self->ReadValues(counts, values.get());
    self->loop_->Post([self, status, values, epoch] {
      self->values_.EndReading();
      if (self->closed_ || self->committed_.epoch() != epoch) {
        return;
      }
      if (!status.ok()) {
        self->Abort(status, {});
        return;
      }
      self->nodes_->member().Values(std::move(*values));
      self->Advance();
    });
  });
}

void JobCore::NodeValuesAgreed() { values_.Commit(); }

// Attempts ----------------------------------------------------------------------------------------------------------

void JobCore::NodeAbort(const absl::Status& cause) {
  if (pending_abort_.has_value() && !commits_.decision().committing()) {
    auto [own, lost] = *std::move(pending_abort_);
    pending_abort_.reset();
    Abort(std::move(own), std::move(lost));
    return;
  }
  Abort(cause, {});
}

void JobCore::NodeGeneration(uint64_t generation) {
  nodes_->BeginGeneration(generation);
  if (node_gathers_ != nullptr) {
    node_gathers_->BeginGeneration(generation);
  }
}

void JobCore::NodeClose(const std::string& why) { Close(why); }

}  // namespace shardd
