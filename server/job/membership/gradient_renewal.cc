#include "server/job/membership/gradient_renewal.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/epoch_end.h"
#include "server/job/job_events.h"
#include "server/job/job_part.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/job_work.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/write_undo.h"
#include "server/loop/core_loop.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

GradientRenewal::GradientRenewal(Facts facts, Services services)
    : see_(std::move(facts)), use_(std::move(services)), writers_(use_.memory) {}

absl::Status GradientRenewal::MayAttach(const std::string& what, int rank, int32_t pid, const UniqueFd& process,
                                        bool replace) {
  const AttachAnswer answer = writers_.MayAttach(what, rank, pid, process, replace);
  FreeUnused();
  return Settle(what, rank, answer);
}

absl::Status GradientRenewal::Settle(const std::string& what, int rank, const AttachAnswer& answer) {
  if (!answer.not_killed.ok()) {
    use_.events->Add(rank, "replace", std::string(answer.not_killed.message()));
  }
  return answer.renew.empty() || writers_.under_way() ? answer.status : Renew(what, answer.renew);
}

// Behind what devices, and the copier, may still do with them.
void GradientRenewal::FreeUnused() {
  std::shared_ptr<JobSlab> slab = writers_.TakeUnused();
  if (slab == nullptr) {
    return;
  }
  auto free = [this, job = use_.work->Keep(), slab](const absl::Status&) { use_.maker->Post([slab] {}); };
  auto fence = [this, free] {
    if (see_.end->closed()) return free(absl::OkStatus());
    use_.devices->Submit("free gradient shards", use_.devices->Divide(DeviceOps(see_.plan->world_size)),
                         use_.work->Join(use_.devices->count(), free));
  };
  use_.behind_copies([loop = use_.work->loop(), fence] { loop->Post(fence); });
}

absl::Status GradientRenewal::Renew(const std::string& what, const std::string& why) {
  SHARDD_RETURN_IF_ERROR(writers_.CheckNoneLeft(what, why));
  if (see_.sessions->attached() > 0) {
    use_.job->Fail(absl::AbortedError(absl::StrCat(what, why, ": all ranks begin anew with new ones")));
  }
  if (see_.end->closed() || see_.decision->committing() || see_.promised() || use_.work->gradient_work() > 0 ||
      see_.undo->undoing()) {
    return absl::AbortedError(absl::StrCat(what, why, ", and work on them is under way; attach again"));
  }
  SHARDD_RETURN_IF_ERROR(writers_.TakeFailure(what, why));
  use_.events->Add(-1, "renew",
                   absl::StrCat(why, ": new ones are made, and the old ones are left to ", writers_.Begin()));
  use_.maker->Post([this, job = use_.work->Keep()]() mutable {
    use_.work->loop()->Post([this, job = std::move(job), slab = use_.memory->MakeGradientsAgain(*see_.plan)]() mutable {
      Made(std::move(slab));
    });
  });
  return absl::AbortedError(absl::StrCat(what, why, ": new ones are being made; attach again"));
}

void GradientRenewal::Made(absl::StatusOr<std::unique_ptr<JobSlab>> slab) {
  if (see_.end->closed()) {
    writers_.Stop();
    use_.maker->Post([slab = std::move(slab)] {});
    return;
  }
  if (!slab.ok()) {
    writers_.Fail(slab.status());
    return;
  }
  writers_.Leave(use_.memory->SetGradients(*std::move(slab)));
  FreeUnused();
  use_.renewed();
}

}  // namespace shardd
