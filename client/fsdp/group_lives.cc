#include "client/fsdp/group_lives.h"

#include <algorithm>

#include "client/fsdp/gradient_slots.h"

namespace shardd::fsdp {
namespace {

size_t ByteOf(int32_t index) { return static_cast<size_t>(index) / 8; }
uint8_t BitOf(int32_t index) { return static_cast<uint8_t>(1u << (index % 8)); }

std::vector<int32_t> ParamCounts(Job& job) {
  std::vector<int32_t> counts(static_cast<size_t>(job.info().group_count));
  for (size_t g = 0; g < counts.size(); ++g) {
    counts[g] = job.group(static_cast<int32_t>(g)).info().param_count;
  }
  return counts;
}

}  // namespace

GroupLives::GroupLives(Shell& shell, Job& job)
    : GroupLives(shell, ParamCounts(job),
                 SharedSlots(GradientRanges(job), static_cast<size_t>(job.info().group_count))) {}

GroupLives::GroupLives(Shell& shell, const std::vector<int32_t>& params, std::vector<int32_t> slots)
    : shell_(shell), groups_(params.size()), writers_(params.size(), -1) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].slot = slots[g];
    groups_[g].present.assign((static_cast<size_t>(params[g]) + 7) / 8, 0);
    groups_[g].fresh = groups_[g].present;
  }
}

Status GroupLives::Unshard(int32_t id, shardd_phase phase) {
  Group& group = at(id);
  if (phase == SHARDD_BACKWARD && group.prefetched) {
    group.prefetched = false;
    return Status();
  }
  Status status = shell_.Unshard(id, phase);
  if (status.ok()) {
    ++group.holds;
  }
  return status;
}

Status GroupLives::Prefetch(int32_t id) {
  Status status = Unshard(id, SHARDD_BACKWARD);
  if (status.ok()) {
    at(id).prefetched = true;
  }
  return status;
}

Status GroupLives::Reshard(int32_t id) {
  Status status = shell_.Reshard(id);
  if (status.ok()) {
    --at(id).holds;
  }
  return status;
}

Status GroupLives::ReshardAll(int32_t id) {
  Group& group = at(id);
  group.stays = false;
  group.prefetched = false;
  while (group.holds > 0) {
    Status status = Reshard(id);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

Status GroupLives::PrepareGradients(int32_t id) {
  Group& group = at(id);
  if (group.slot_ready) {
    return Status();
  }
  int32_t& writer = writers_[static_cast<size_t>(group.slot)];
  if (writer >= 0 && writer != id) {
    Status status = Submit(writer);
    if (!status.ok()) {
      return status;
    }
    at(writer).slot_ready = false;  // also where it has written nothing
  }
  Status status = shell_.WaitGradientSlot(id);
  if (status.ok()) {
    writer = id;
    group.slot_ready = true;
  }
  return status;
}

void GroupLives::MarkGradient(int32_t id, int32_t index, bool fresh) {
  Group& group = at(id);
  group.present[ByteOf(index)] |= BitOf(index);
  if (fresh) {
    group.fresh[ByteOf(index)] |= BitOf(index);
  }
  group.written = true;
}

bool GroupLives::HasGradient(int32_t id, int32_t index) const {
  return (at(id).present[ByteOf(index)] & BitOf(index)) != 0;
}

Status GroupLives::Submit(int32_t id) {
  Group& group = at(id);
  if (!group.written) {
    return Status();
  }
  if (group.stays) {
    // The daemon is told that this rank has the parameters in this backward, too.
    Status status = shell_.Unshard(id, SHARDD_BACKWARD);
    if (status.ok()) {
      status = shell_.WaitUnshard(id);
    }
    if (!status.ok()) {
      return status;
    }
  }
  Status status = shell_.SubmitGradients(id, group.present.data(), group.fresh.data());
  if (!status.ok()) {
    return status;
  }
  ClearWritten(group);
  group.submitted = true;
  if (group.stays) {
    group.stays = false;
    return shell_.Reshard(id);
  }
  return Status();
}

Status GroupLives::SubmitOwed(int32_t id) {
  Group& group = at(id);
  if (!group.written && group.ran_forward && !group.submitted) {
    Status status = PrepareGradients(id);
    if (!status.ok()) {
      return status;
    }
    group.written = true;
  }
  if (group.ran_forward || !group.written) {
    return Submit(id);
  }
  Status status = shell_.Unshard(id, SHARDD_BACKWARD);
  if (status.ok()) {
    status = shell_.WaitUnshard(id);
  }
  if (status.ok()) {
    status = Submit(id);
  }
  return status.ok() ? shell_.Reshard(id) : status;
}

void GroupLives::EndBackward(int32_t id, bool stays) {
  at(id).submitted = false;
  at(id).stays = stays;
}

void GroupLives::AbandonBackward(int32_t id) { ClearWritten(at(id)); }

void GroupLives::Forget(int32_t id) {
  Group& group = at(id);
  ClearWritten(group);
  group.holds = 0;
  group.prefetched = group.stays = group.ran_forward = group.submitted = false;
}

void GroupLives::ClearWritten(Group& group) {
  group.slot_ready = group.written = false;
  std::fill(group.present.begin(), group.present.end(), uint8_t{0});
  std::fill(group.fresh.begin(), group.fresh.end(), uint8_t{0});
}

}  // namespace shardd::fsdp
