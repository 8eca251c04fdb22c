// Values that all ranks of all nodes load between steps.

#include <algorithm>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/trainer.h"

namespace shardd::e2e {
namespace {

// What is loaded before a step depends on nothing else, so that loading it once more changes nothing; no step makes it.
float LoadedValue(int64_t step, int element) {
  return 0.25f + 0.001f * static_cast<float>(step * kNumel[kB1] + element);
}

}  // namespace

bool Trainer::LoadsBefore(int64_t step) const {
  const int every = args_.Int("load_every");
  return every > 0 && step > 0 && step % every == 0;
}

// Writes mid.b1 with its optimizer's state and count: of each node's ranks each a part of the whole.
Status Trainer::Load(int64_t step) {
  if (args_.Int("reads_first") != 0) {  // this node's ranks still read the version that others are about to write
    for (int group = 0; group < kGroupCount; ++group) {
      moments_.Reach("reads_first", step);
      RETURN_IF_ERROR(ReadGroup(group, SHARDD_FORWARD, /*hold=*/false));
    }
    report_.AddNote("read " + std::to_string(seen_[kB1].front()));
  }
  Status inner;
  Job::FullParams options;
  options.writeback = true;
  moments_.Reach("loads", step);
  const Status status = job_->UnshardParams(options, [&] {
    const int parts = job_->info().world_size;
    for (int i = rank_; i < kNumel[kB1] && inner.ok(); i += parts) {
      const float value = LoadedValue(step, i);
      const float moment = value / 128;
      inner = job_->WriteParameter(param_[kB1], &value, i, 1);
      if (inner.ok()) {
        inner = Status::Take(shardd_write_optimizer_state(job_->c_job(), param_[kB1], 0, &moment, i, 1));
      }
      moments_.Reach("load", step);
    }
    if (inner.ok()) inner = Status::Take(shardd_write_update_count(job_->c_job(), param_[kB1], 2 * step + 1));
    moments_.Reach("loaded", step);
  });
  moments_.Reach("load_ended", step);
  return inner.ok() ? status : inner;
}

// The same value, through the shards of this rank: the optimizer's state and count stay.
Status Trainer::Edit(int64_t step) {
  moments_.Reach("loads", step);
  const shardd_shard_range range = job_->shard_range(param_[kB1]);
  auto* const shard = static_cast<float*>(job_->shard_data(param_[kB1]));
  for (int64_t i = range.write_first; i < range.write_first + range.write_numel; ++i) {
    shard[i] = LoadedValue(step, static_cast<int>(i));
    moments_.Reach("load", step);
  }
  moments_.Reach("loaded", step);
  if (args_.Int("edits") == 2) RETURN_IF_ERROR(job_->HandInEdits());
  moments_.Reach("load_ended", step);
  return Status();
}

// After an epoch's end the job has what was loaded before the step on all nodes, or on none.
Status Trainer::CheckLoadIsWhole(int64_t step) {
  RETURN_IF_ERROR(InPass(step, [&] { return ReadGroup(kMid, SHARDD_FORWARD, /*hold=*/false); }));
  int loaded = 0;
  for (int i = 0; i < kNumel[kB1]; ++i) loaded += seen_[kB1][static_cast<size_t>(i)] == LoadedValue(step, i) ? 1 : 0;
  report_.AddNote(loaded > 0 ? "loaded " + std::to_string(step) : "taken back " + std::to_string(step));
  return loaded == 0 || loaded == kNumel[kB1]
             ? Status()
             : Status(Code::kDataLoss, "a part of what was loaded before step " + std::to_string(step) + " is there (" +
                                           std::to_string(loaded) + " of " + std::to_string(kNumel[kB1]) +
                                           " elements)");
}

}  // namespace shardd::e2e
