#include "client/c/job/read_only_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "common/tensor/dtype.h"

namespace shardd {

absl::Status ReadOnlyMemory::Set(bool watch) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  watching_ = watch;
  return Watch();
}

void ReadOnlyMemory::OnMapped() { (void)Watch(); }

void ReadOnlyMemory::Forget() {
  if (texts_ != nullptr && !ReadOnlyFaults::Forget(texts_.get())) {
    (void)texts_.release();
  }
  texts_.reset();
}

absl::Status ReadOnlyMemory::Watch() {
  Forget();
  if (!watching_) {
    return absl::OkStatus();
  }
  const RankPlan& plan = attachment_.plan();
  const SessionMemory& memory = attachment_.memory();
  auto texts = std::make_unique<ReadOnlyTexts>();
  const auto kind = [&](const char* what, const char* why) {
    return texts->AddKind(
        {absl::StrCat("shardd: write ", what, "\""), absl::StrCat("\": ", why, " (rank=", plan.rank(), ")\n")});
  };
  const int shard = kind("parameter ",
                         "the job was opened with trainers that never write (got trainersNeverWrite true, want false); "
                         "a shardd.torch optimizer says in_place_edits=True");
  const int unsharded =
      kind("unsharded parameter ", "the daemon makes what is unsharded; reshard, and write the shard");
  const int state =
      kind("optimizer state of ",
           "the daemon's optimizer updates it; load it into the optimizer, or put another tensor in its place; "
           "a program that stores into it wants torch's optimizers in the trainers (--stock-optimizers, "
           "install(optimizers=False))");
  for (const ParamPlan& param : plan.plan().params) {
    const FlatParamPlan& flat = plan.flat_of(param);
    const auto add = [&](const MappedSlab& slab, int64_t offset_bytes, DType dtype, int which) {
      if (slab.data() != nullptr && offset_bytes >= 0) {
        const int64_t element_bytes = DTypeSizeBytes(dtype);
        texts->Add(slab.At<const char>(offset_bytes) + param.offset * element_bytes, param.numel * element_bytes, which,
                   param.fqn);
      }
    };
    if (!plan.trainers_write()) {
      add(memory.shards_slab(), flat.shards_offset_bytes, param.dtype, shard);
    }
    add(memory.parameters_slab(), flat.params_offset_bytes, flat.unsharded_dtype, unsharded);
    for (int i = 0; i < flat.optimizer_states && flat.optimizer_offset_bytes >= 0 && !plan.trainers_optimize(); ++i) {
      add(memory.optimizer_slab(), flat.optimizer_offset_bytes + i * flat.StateStrideBytes(), v1::DTYPE_FLOAT32, state);
    }
  }
  texts->Sort();
  texts_ = std::move(texts);
  const absl::Status status = ReadOnlyFaults::Watch(texts_.get());
  if (!status.ok()) {
    texts_.reset();
  }
  return status;
}

}  // namespace shardd
