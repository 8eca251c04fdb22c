// New gradient shards (membership/gradient_renewal.h), as the job makes them.

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

// Behind what devices, and the copier, may still do with them.
void JobCore::FreeLeftGradients() {
  std::shared_ptr<JobSlab> slab = renewal_.TakeUnused();
  if (slab == nullptr) {
    return;
  }
  auto free = [self = shared_from_this(), slab](const absl::Status&) { self->memory_worker_->Post([slab] {}); };
  auto fence = [self = shared_from_this(), this, free] {
    if (closed_) return free(absl::OkStatus());
    optimizer_devices_.Submit("free gradient shards", optimizer_devices_.Divide(DeviceOps(world_size())),
                              work_.Join(optimizer_devices_.count(), free));
  };
  values_.Behind([loop = loop_, fence] { loop->Post(fence); });
}

absl::Status JobCore::Settle(int rank, const std::string& what, const AttachAnswer& answer) {
  if (!answer.not_killed.ok()) {
    events_.Add(rank, "replace", std::string(answer.not_killed.message()));
  }
  return answer.renew.empty() || renewal_.under_way() ? answer.status : RenewGradients(what, answer.renew);
}

absl::Status JobCore::RenewGradients(const std::string& what, const std::string& why) {
  SHARDD_RETURN_IF_ERROR(renewal_.CheckNoneLeft(what, why));
  if (attached() > 0) {
    Abort(absl::AbortedError(absl::StrCat(what, why, ": all ranks begin anew with new ones")), {});
  }
  if (closed_ || commits_.decision().committing() || promised() || work_.gradient_work() > 0 ||
      values_.undo().undoing()) {
    return absl::AbortedError(absl::StrCat(what, why, ", and work on them is under way; attach again"));
  }
  SHARDD_RETURN_IF_ERROR(renewal_.TakeFailure(what, why));
  events_.Add(-1, "renew", absl::StrCat(why, ": new ones are made, and the old ones are left to ", renewal_.Begin()));
  memory_worker_->Post([self = shared_from_this(), this] {
    auto made = std::make_shared<absl::StatusOr<std::unique_ptr<JobSlab>>>(memory_->MakeGradientsAgain(*plan_));
    loop_->Post([self, this, made] {
      if (closed_) {
        renewal_.Stop();
        memory_worker_->Post([made] {});
        return;
      }
      if (!made->ok()) {
        renewal_.Fail(made->status());
        return;
      }
      renewal_.Leave(memory_->SetGradients(*std::move(*made)));
      FreeLeftGradients();
      waits_.ForgetAllStragglers();  // what GPUs still add goes into the old ones, too
    });
  });
  return absl::AbortedError(absl::StrCat(what, why, ": new ones are being made; attach again"));
}

}  // namespace shardd
