#include "server/job/job_extend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/node_part.h"
#include "common/plan/whole_params.h"
#include "server/job/job_core.h"
#include "server/job/nodes/state_transfers.h"
#include "server/session/session.h"

namespace shardd {

void CopyExtended(const ShardPlan& from, const SlabPointers& source, const ShardPlan& to, const SlabPointers& target,
                  const CopyBetweenSlabs& copy_bytes) {
  for (const ParamPlan& new_param : to.params) {
    const ParamPlan& old_param = from.params[from.FindParam(new_param.fqn)];
    const FlatParamPlan& old_flat = from.flat_params[old_param.flat_param];
    const FlatParamPlan& new_flat = to.flat_params[new_param.flat_param];
    // Where parameters are cut over nodes, what others hold is a hole here.
    const ParamRange held = to.cut_over_nodes
                                ? NodeRangeOf(to, static_cast<int>(&new_param - to.params.data()), to.node)
                                : ParamRange{0, new_param.numel};
    if (held.numel == 0) continue;
    const auto copy_some = [&](char* old_slab, int64_t old_offset, char* new_slab, int64_t new_offset, int64_t element,
                               int64_t numel) {
      copy_bytes(new_slab + new_offset + (new_param.offset + held.first) * element,
                 old_slab + old_offset + (old_param.offset + held.first) * element, numel * element);
    };
    const auto copy = [&](char* old_slab, int64_t old_offset, char* new_slab, int64_t new_offset, int64_t element) {
      copy_some(old_slab, old_offset, new_slab, new_offset, element, held.numel);
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
      for (int state = 0; state < std::min(old_flat.optimizer_states, new_flat.optimizer_states); ++state) {
        // Of a state that has less than the parameter the rest is a hole.
        const int64_t of_state = StateNumel(to, static_cast<int>(&new_param - to.params.data()), state);
        const int64_t numel = std::min(held.numel, of_state - held.first);
        if (numel <= 0) continue;
        copy_some(source.optimizer + c * from.optimizer_stride_bytes,
                  old_flat.optimizer_offset_bytes + state * old_flat.StateStrideBytes(),
                  target.optimizer + c * to.optimizer_stride_bytes,
                  new_flat.optimizer_offset_bytes + state * new_flat.StateStrideBytes(), sizeof(float), numel);
      }
    }
  }
}

CommittedFacts JobCore::committed_facts() const {
  CommittedFacts facts{committed_.epoch() + 1,   committed_.version(),        committed_.step(),
                       committed_.step_counts(), committed_.trainer_states(), counters_};
  facts.generation = committed_.generation();
  return facts;
}

void JobCore::AwaitExtension(Session* session, std::shared_ptr<const Extension> extension, Extensions::Done done,
                             Extensions::Build build) {
  if (session->held) {  // it has asked for something before that is not done yet
    session->when_released.push_back([self = shared_from_this(), id = session->id(), extension, done, build] {
      if (Session* released = self->sessions_.Find(id); released != nullptr) {
        self->AwaitExtension(released, extension, done, build);
      } else {
        done(absl::AbortedError("extend job: the session has ended"));
      }
    });
    return;
  }
  const int rank = session->rank();
  absl::Status status = extensions_.GoOn(rank);
  status = status.ok() ? extensions_.CheckMayAsk(rank) : status;
  if (status.ok() && nodes_.over_nodes() && gradients_.pairing().closed(rank) > 0) {
    status =
        committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "ExtendJob",
                             "a step has begun, and on several nodes more is trained between steps alone; unfreeze "
                             "behind optimizer.step()");
  }
  if (!status.ok()) {
    done(std::move(status));
    return;
  }
  session->last_command_time = MonotonicNow();
  session->SetLastCommand("ExtendJob");
  const std::string what = extension->what;
  extensions_.Ask(rank, extension, std::move(done), std::move(build));
  if (status = extensions_.CheckNobodyWentOn(rank, what); !status.ok()) {
    Abort(std::move(status), {});
    return;
  }
  if (status = extensions_.CheckEqual(); !status.ok()) {
    Extensions::Answer(extensions_.TakeAll(), status);
    return;
  }
  Advance();
}

bool JobCore::NodesExtend(bool made) {
  if (made) {
    const Extensions::TakeItsPlace take = extensions_.TakeBuilt();
    if (take == nullptr) return false;
    take();
  } else {
    if (!extensions_.awaits_nodes()) return false;
    extensions_.StartBuild();
  }
  return true;
}

void JobCore::ExtensionBuilt(const Extension& extension, Extensions::TakeItsPlace take) {
  extensions_.Built(std::move(take));
  events_.Add(-1, "extend",
              absl::StrCat(extension.what, ": it is made, and takes the job's place when all nodes have"));
  nodes_.steps().SayExtends(extension, /*made=*/true);
}

void JobCore::Widen(std::shared_ptr<const Extension> extension, int as, Extensions::Build build) {
  if (end_.closed() || extensions_.widens()) return;
  const std::string what = extension->what;
  extensions_.Widen(std::move(extension), std::move(build));
  if (!extensions_.widens()) return;  // what all nodes have decided is about to be here
  events_.Add(-1, "extend", absl::StrCat(what, ", as node ", as));
  if (sessions_.attached() > 0) {
    Abort(absl::AbortedError(absl::StrCat("node ", as, " (", plan()->config.nodes().addresses(as), ") trains ", what,
                                          " by now, and this node missed that; attach again, to the job as it is")),
          {});
  }
  Advance();
}

bool MayBeWidened(JobCore& job) {
  if (!job.nodes().states().has_come()) return true;
  (void)job.extensions().PutOffWidening(MonotonicNow(), /*pause=*/absl::ZeroDuration(), /*counts=*/false);
  job.Advance();
  return false;
}

}  // namespace shardd
