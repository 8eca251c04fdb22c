#include "server/job/job_extend.h"

#include <algorithm>
#include <utility>

#include "server/job/job_core.h"
#include "server/loop/monotonic_now.h"
#include "server/session/session.h"

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
      for (int state = 0; state < std::min(old_flat.optimizer_states, new_flat.optimizer_states); ++state) {
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

}  // namespace shardd
