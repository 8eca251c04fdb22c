#include "client/c/job/store_faults.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

bool StoreFaults::OnStoreFault(const void* address) {
  if (windows_.open() && attachment_.memory().WindowCovers(address)) {
    return true;  // another thread's fault has opened it
  }
  if (optimizer_.IsDaemons(address)) {
    if (!optimizer_.has_stores()) {
      optimizer_.NoteStores(NameOf(address));
    }
    return attachment_.memory().optimizer_slab().MakePiecePrivate(address);
  }
  absl::Status status = Allow(address);
  if (status.ok()) {
    return true;
  }
  // The store cannot be undone and nobody may see it: it goes to a copy of this process, and the next call says why.
  for (const MappedSlab* slab : attachment_.memory().watched_slabs()) {
    if (slab->data() != nullptr && !slab->MakePrivate()) {
      return false;
    }
  }
  attachment_.Fail(std::move(status));
  return true;
}

absl::Status StoreFaults::Allow(const void* address) {
  const auto in = [address](const MappedSlab& slab) {
    const auto* begin = static_cast<const char*>(slab.data());
    return begin != nullptr && address >= begin && address < begin + slab.size_bytes();
  };
  const auto refuse = [&](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("write ", NameOf(address), ": ", why, " (rank=", attachment_.rank(), ")"));
  };
  if (in(attachment_.memory().parameters_slab())) {
    return refuse("its cast copy is made by the daemon; reshard, and write the shard");
  }
  if (!attachment_.plan().trainers_write()) {
    return refuse("the job was opened with trainers that never write (got trainersNeverWrite true, want false)");
  }
  if (passes_.reading()) {
    return refuse(
        "written inside a pass, while other ranks may read it; write between a backward, or a forward without "
        "gradients, and the next forward");
  }
  if (handles_.in_full_params()) {
    return refuse(
        "written while this rank is inside of full parameters, where others may read it; write into the full "
        "parameters, with writeback, or outside");
  }
  attachment_.session().life().set_in_signal(true);
  absl::Status status;
  if (passes_.paused()) {
    status = passes_.LeaveFor(NameOf(address));
  }
  if (status.ok()) {
    status = passes_.OpenWindow();
  }
  attachment_.session().life().set_in_signal(false);
  return status;
}

std::string StoreFaults::NameOf(const void* address) const {
  const RankPlan& plan = attachment_.plan();
  const SessionMemory& memory = attachment_.memory();
  for (const ParamPlan& param : plan.plan().params) {
    const FlatParamPlan& flat = plan.flat_of(param);
    const auto holds = [&](const MappedSlab& slab, int64_t offset_bytes, int64_t element_bytes) {
      if (slab.data() == nullptr || offset_bytes < 0) {
        return false;  // the group has none there
      }
      const char* begin = slab.At<const char>(offset_bytes) + param.offset * element_bytes;
      return address >= begin && address < begin + param.numel * element_bytes;
    };
    if (holds(memory.shards_slab(), flat.shards_offset_bytes, DTypeSizeBytes(param.dtype))) {
      return absl::StrCat("parameter \"", param.fqn, "\"");
    }
    if (holds(memory.parameters_slab(), flat.params_offset_bytes, DTypeSizeBytes(flat.unsharded_dtype))) {
      return absl::StrCat("unsharded parameter \"", param.fqn, "\"");
    }
    for (int state = 0; state < plan.plan().optimizer_states && flat.optimizer_offset_bytes >= 0; ++state) {
      if (holds(memory.optimizer_slab(), flat.optimizer_offset_bytes + state * flat.StateStrideBytes(),
                DTypeSizeBytes(v1::DTYPE_FLOAT32))) {
        return absl::StrCat("optimizer state of \"", param.fqn, "\"");
      }
    }
  }
  return "padding";
}

}  // namespace shardd
