#include "server/job/nodes/model_digests.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/status/status_macros.h"
#include "server/job/job_part.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "server/multinode/value_digest.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr int64_t kReadPieceBytes = int64_t{1} << 20;

}  // namespace

const std::vector<uint64_t>& ModelDigests::At(uint64_t version) const {
  static const auto* const kNone = new std::vector<uint64_t>();
  return version == version_ ? by_param_ : *kNone;
}

void ModelDigests::StepCommitted() {
  if (see_.plan->cut_over_nodes || see_.committed->step() % see_.plan->config.compare_every() != 0) {
    return;
  }
  ++under_way_;
  Take({}, {},
       [this, version = see_.committed->version(), epoch = see_.committed->epoch()](const absl::Status& status,
                                                                                    const Digests& digests) {
         --under_way_;
         if (status.ok()) {
           version_ = version;
           by_param_.assign(digests.digests().begin(), digests.digests().end());
         } else if (see_.committed->epoch() == epoch) {
           use_.job->Fail(status);
         }
       });
}

void ModelDigests::SayValues(std::vector<SlabPart> stale, std::vector<uint32_t> written, std::function<void()> ended) {
  Take(std::move(stale), std::move(written),
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
         if (use_.promise != nullptr) use_.promise();
         use_.member->Values(std::move(digests));
       });
}

void ModelDigests::Take(std::vector<SlabPart> stale, std::vector<uint32_t> written,
                        std::function<void(const absl::Status&, Digests)> done) {
  use_.worker->Post([this, keep = use_.work->Keep(), stale = std::move(stale), written = std::move(written),
                     counts = see_.committed->step_counts(), later = see_.committed->version() > 0,
                     done = std::move(done)]() mutable {
    absl::Status status;
    for (SlabPart& part : stale) {
      while (status.ok() && part.numel > 0) status = part.ClearSome();
    }
    Digests digests;
    if (!later) written.clear();  // parts without initial values are zero
    if (status.ok()) status = Read(counts, written, &digests);
    use_.work->loop()->Post(
        [this, keep = std::move(keep), done = std::move(done), status, digests = std::move(digests)] {
          use_.work->AndAdvance([&](const absl::Status& read) { done(read, digests); })(status);
        });
  });
}

absl::Status ModelDigests::Read(const std::vector<int64_t>& step_counts, const std::vector<uint32_t>& written,
                                Digests* digests) const {
  std::string piece;
  for (size_t p = 0; p < see_.plan->params.size(); ++p) {
    if (see_.plan->cut_over_nodes) {
      // Each node has its own part, but of the updates of a parameter all count the same, and all write the same of its
      // parts. 0: it has nothing of it.
      ValueDigest counts;
      counts.AddWord(static_cast<uint64_t>(step_counts[p]));
      if (!written.empty()) counts.AddWord(written[p]);
      digests->add_digests(ElementsOfNode(*see_.plan, static_cast<int>(p)).numel > 0 ? counts.value() | 1 : 0);
      continue;
    }
    ValueDigest digest;
    for (int what = 0; what <= see_.plan->optimizer_states; ++what) {
      const SlabPart written = WholePart(*see_.plan, *see_.memory, static_cast<int>(p), what);
      const int64_t bytes = written.size_bytes();
      for (int64_t at = 0; at < bytes; at += kReadPieceBytes) {
        piece.resize(static_cast<size_t>(std::min(kReadPieceBytes, bytes - at)));
        SHARDD_RETURN_IF_ERROR(
            written.slab->Read(written.offset_bytes + at, piece.data(), static_cast<int64_t>(piece.size())));
        digest.Add(piece.data(), piece.size());
      }
    }
    digest.AddWord(static_cast<uint64_t>(step_counts[p]));
    digests->add_digests(digest.value());
  }
  return absl::OkStatus();
}

}  // namespace shardd
