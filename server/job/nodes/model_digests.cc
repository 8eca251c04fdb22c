#include "server/job/nodes/model_digests.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/job/job_part.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/snapshot.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr int64_t kReadPieceBytes = int64_t{1} << 20;

// As PartOfNode, of what trainers have stored, in the snapshot that begins at `at_bytes`: part k is state k - 1 of
// their optimizer.
SlabPart PartOfSnapshot(const ShardPlan& plan, const JobMemory& memory, int param, int part, int64_t at_bytes) {
  if (part == 0) {
    SlabPart value = PartOfNode(plan, memory, param, part);
    return {memory.kept(), at_bytes + value.offset_bytes, value.element_bytes, value.numel};
  }
  const ParamPlan& of = plan.params[static_cast<size_t>(param)];
  const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(of.flat_param)];
  if (!of.requires_grad || flat.optimizer_offset_bytes < 0 || part > flat.optimizer_states) return {};
  const auto element_bytes = static_cast<int64_t>(sizeof(float));
  const ParamRange own = ElementsOfNode(plan, param);
  return {memory.kept(),
          at_bytes + plan.memory.shards_bytes + flat.optimizer_offset_bytes + (part - 1) * flat.StateStrideBytes() +
              (of.offset + own.first) * element_bytes,
          element_bytes, own.numel};
}

}  // namespace

// A pass without a step is a version, and nothing of the step that nodes compare.
const std::vector<uint64_t>& ModelDigests::OfCommitted() const {
  static const auto* const kNone = new std::vector<uint64_t>();
  const bool in_trainers = see_.plan->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool is_of_it = in_trainers ? step_ == see_.committed->step() : version_ == see_.committed->version();
  // Where a state of another attempt has come since, it may have the same number.
  return is_of_it && came_ == see_.committed->states_that_came() ? by_param_ : *kNone;
}

void ModelDigests::StepCommitted() {
  const bool is_alone = see_.plan->cut_over_nodes && !HasRows(*see_.plan);  // no other node has what this one has
  if (is_alone || see_.committed->step() % see_.plan->config.compare_every() != 0) {
    return;
  }
  ++under_way_;
  // The one that is made the committed version's when all have heard of this commit.
  const bool kept = see_.snapshot != nullptr && see_.snapshot->two();
  Take({}, {}, kept ? see_.snapshot->next_offset_bytes() : -1,
       [this, version = see_.committed->version(), step = see_.committed->step(), epoch = see_.committed->epoch(),
        came = see_.committed->states_that_came()](const absl::Status& status, const Digests& digests) {
         --under_way_;
         if (status.ok()) {
           version_ = version;
           step_ = step;
           came_ = came;
           by_param_.assign(digests.digests().begin(), digests.digests().end());
         } else if (see_.committed->epoch() == epoch) {
           use_.job->Fail(status);
         }
       });
}

void ModelDigests::SayValues(std::vector<SlabPart> stale, std::vector<uint32_t> written, std::function<void()> ended) {
  Take(std::move(stale), std::move(written), /*snapshot=*/-1,
       [this, ended = std::move(ended), epoch = see_.committed->epoch()](const absl::Status& status, Digests digests) {
         ended();
         if (see_.committed->epoch() != epoch) {
           return;
         }
         digests.set_version(see_.committed->version() + 1);
         if (!status.ok()) {
           use_.job->Fail(status);
           return;
         }
         auto say = [this, digests = std::move(digests)] {
           if (use_.promise != nullptr) use_.promise();
           use_.member->Values(digests);
         };
         use_.keep == nullptr ? say() : use_.keep(std::move(say));
       });
}

void ModelDigests::Take(std::vector<SlabPart> stale, std::vector<uint32_t> written, int64_t snapshot,
                        std::function<void(const absl::Status&, Digests)> done) {
  use_.worker->Post([this, keep = use_.work->Keep(), stale = std::move(stale), written = std::move(written), snapshot,
                     counts = see_.committed->step_counts(), later = see_.committed->version() > 0,
                     done = std::move(done)]() mutable {
    absl::Status status;
    for (SlabPart& part : stale) {
      while (status.ok() && part.numel > 0) status = part.ClearSome();
    }
    Digests digests;
    if (!later) written.clear();  // parts without initial values are zero
    if (status.ok()) status = Read(counts, written, snapshot, &digests);
    use_.work->loop()->Post(
        [this, keep = std::move(keep), done = std::move(done), status, digests = std::move(digests)] {
          use_.work->AndAdvance([&](const absl::Status& read) { done(read, digests); })(status);
        });
  });
}

absl::Status ModelDigests::AddBytes(const JobSlab& slab, int64_t offset_bytes, int64_t size_bytes,
                                    ValueDigest* digest) const {
  std::string piece;
  for (int64_t at = 0; at < size_bytes; at += kReadPieceBytes) {
    piece.resize(static_cast<size_t>(std::min(kReadPieceBytes, size_bytes - at)));
    SHARDD_RETURN_IF_ERROR(slab.Read(offset_bytes + at, piece.data(), static_cast<int64_t>(piece.size())));
    digest->Add(piece.data(), piece.size());
  }
  return absl::OkStatus();
}

absl::Status ModelDigests::Read(const std::vector<int64_t>& step_counts, const std::vector<uint32_t>& written,
                                int64_t snapshot, Digests* digests) const {
  const bool cut = see_.plan->cut_over_nodes;
  for (size_t p = 0; cut && p < see_.plan->params.size(); ++p) {
    // Each node of a row has its own part, but of the updates of a parameter all count the same, and all write the same
    // of its parts. 0: it has nothing of it.
    ValueDigest counts;
    counts.AddWord(static_cast<uint64_t>(step_counts[p]));
    if (!written.empty()) counts.AddWord(written[p]);
    digests->add_digests(ElementsOfNode(*see_.plan, static_cast<int>(p)).numel > 0 ? counts.value() | 1 : 0);
  }
  for (size_t p = 0; (!cut || HasRows(*see_.plan)) && p < see_.plan->params.size(); ++p) {
    ValueDigest digest;
    for (int what = 0; what <= see_.plan->optimizer_states; ++what) {
      const SlabPart part = snapshot < 0
                                ? PartOfNode(*see_.plan, *see_.memory, static_cast<int>(p), what)
                                : PartOfSnapshot(*see_.plan, *see_.memory, static_cast<int>(p), what, snapshot);
      if (part.slab == nullptr) continue;
      SHARDD_RETURN_IF_ERROR(AddBytes(*part.slab, part.offset_bytes, part.size_bytes(), &digest));
    }
    digest.AddWord(static_cast<uint64_t>(step_counts[p]));
    digests->add_digests(digest.value());
  }
  return absl::OkStatus();
}

}  // namespace shardd
