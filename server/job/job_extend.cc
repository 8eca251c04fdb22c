#include "server/job/job_extend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

void CopyExtended(const ShardPlan& from, const SlabPointers& source, const ShardPlan& to, const SlabPointers& target,
                  const CopyBetweenSlabs& copy_bytes) {
  for (const ParamPlan& new_param : to.params) {
    const ParamPlan& old_param = from.params[from.FindParam(new_param.fqn)];
    const FlatParamPlan& old_flat = from.flat_params[old_param.flat_param];
    const FlatParamPlan& new_flat = to.flat_params[new_param.flat_param];
    const auto copy = [&](char* old_slab, int64_t old_offset, char* new_slab, int64_t new_offset, int64_t element) {
      copy_bytes(new_slab + new_offset + new_param.offset * element, old_slab + old_offset + old_param.offset * element,
                 new_param.numel * element);
    };
    for (int c = 0; c < to.shard_copies; ++c) {
      copy(source.shards + c * from.shards_stride_bytes, old_flat.shards_offset_bytes,
           target.shards + c * to.shards_stride_bytes, new_flat.shards_offset_bytes, DTypeSizeBytes(new_flat.dtype));
    }
    if (new_flat.params_offset_bytes >= 0) {
      copy(source.parameters, old_flat.params_offset_bytes, target.parameters, new_flat.params_offset_bytes,
           DTypeSizeBytes(new_flat.unsharded_dtype));
    }
    if (old_flat.optimizer_offset_bytes < 0 || new_flat.optimizer_offset_bytes < 0) {
      continue;
    }
    for (int c = 0; c < to.optimizer_copies; ++c) {
      for (int state = 0; state < std::min(from.optimizer_states, to.optimizer_states); ++state) {
        copy(source.optimizer + c * from.optimizer_stride_bytes,
             old_flat.optimizer_offset_bytes + state * old_flat.StateStrideBytes(),
             target.optimizer + c * to.optimizer_stride_bytes,
             new_flat.optimizer_offset_bytes + state * new_flat.StateStrideBytes(), sizeof(float));
      }
    }
  }
}

CommittedFacts JobCore::committed_facts() const {
  return {committed_.epoch() + 1,   committed_.version(),        committed_.step(),
          committed_.step_counts(), committed_.trainer_states(), counters_};
}

absl::Status JobCore::CheckMayExtend(int rank) const {
  const RankStep& state = ranks_[rank];
  const char* fact = committed_.version() == 0                 ? "the job has no parameters yet"
                     : full_params_.asked(rank)                ? "the rank is inside EnterFullParams"
                     : state.stepped || decision_.committing() ? "a step is not committed yet"
                     : passes_.entering(rank)                  ? "the rank is entering a pass"
                     : windows_.any_since_version() || windows_.open(rank) || windows_.wants(rank)
                         ? "what was written is not committed yet; enter a pass first"
                         : nullptr;
  if (fact != nullptr) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob", fact);
  }
  for (int other = 0; other < world_size(); ++other) {
    if (other != rank && (ranks_[other].finished || ranks_[other].pending_detach == true)) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob",
                       absl::StrCat("rank ", other, " has finished and takes part in nothing any more"));
    }
  }
  return absl::OkStatus();
}

// Ranks that have gone on where this one asks, and would wait for it.
absl::Status JobCore::CheckNobodyWentOn(int rank, const std::string& what) const {
  for (int other = 0; other < world_size(); ++other) {
    const int closed = pairing_.closed(rank);
    const bool began = pairing_.closed(other) > closed || ranks_[other].stepped || pairing_.GaveFrom(other, closed);
    if (other != rank && began) {
      return RankError(absl::StatusCode::kFailedPrecondition, other, "ExtendJob", AloneText(rank, what));
    }
  }
  return absl::OkStatus();
}

std::string JobCore::AloneText(int rank, const std::string& what) const {
  return absl::StrCat(
      "rank ", rank, " trains ", what,
      " from here on and this rank does not; every rank must unfreeze the same before the same forward");
}

absl::Status JobCore::CheckNobodyExtends(int rank, absl::string_view what, int backward) const {
  for (const auto& [other, asked] : extensions_.by_rank()) {
    if (other != rank && pairing_.closed(other) <= backward) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, what, AloneText(other, asked.extension->what));
    }
  }
  return absl::OkStatus();
}

void JobCore::AwaitExtension(Session* session, std::shared_ptr<const Extension> extension, ExtendDone done,
                             BuildExtended build) {
  if (session->held) {  // it has asked for something before that is not done yet
    session->when_released.push_back([self = shared_from_this(), id = session->id(), extension, done, build] {
      if (Session* released = self->FindSession(id); released != nullptr) {
        self->AwaitExtension(released, extension, done, build);
      } else {
        done(absl::AbortedError("extend job: the session has ended"));
      }
    });
    return;
  }
  const int rank = session->rank();
  absl::Status status = EndAsking(rank);
  status = status.ok() ? CheckMayExtend(rank) : status;
  if (!status.ok()) {
    done(std::move(status));
    return;
  }
  session->last_command_time = MonotonicNow();
  session->last_command = "ExtendJob";
  const std::string what = extension->what;
  extensions_.Ask(rank, extension, std::move(done), std::move(build));
  if (status = CheckNobodyWentOn(rank, what); !status.ok()) {
    Abort(std::move(status), {});
    return;
  }
  const auto& asked = extensions_.by_rank();
  const auto& [first, agreed] = *asked.begin();
  if (const auto other = extensions_.FindDifferent(); other != asked.end()) {
    status = RankError(absl::StatusCode::kFailedPrecondition, other->first, "ExtendJob",
                       absl::StrCat("ranks differ in what they train from here on (got ", other->second.extension->what,
                                    ", rank ", first, ": ", agreed.extension->what, ")"));
    Extensions::Answer(extensions_.TakeAll(), status);
    return;
  }
  Advance();
}

// All ranks have asked for the same.
void JobCore::BuildExtension() {
  Event(-1, "extend", extensions_.by_rank().begin()->second.extension->what);
  extensions_.StartBuild();
}

absl::Status JobCore::EndAsking(int rank) {
  if (!extensions_.Has(rank)) {
    return absl::OkStatus();
  }
  if (extensions_.building()) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob",
                     "the rank goes on before it is answered");
  }
  extensions_.Take(rank)(RankError(absl::StatusCode::kCancelled, rank, "ExtendJob", "the rank has gone on instead"));
  return absl::OkStatus();
}

}  // namespace shardd
