#include "client/fsdp/unit_life.h"

#include <algorithm>

namespace shardd::fsdp {
namespace {

// Until the first that fails.
template <typename Call>
Status ForEach(const std::vector<int32_t>& groups, Call&& call) {
  for (const int32_t group : groups) {
    Status status = call(group);
    if (!status.ok()) {
      return status;
    }
  }
  return Status();
}

}  // namespace

void UnitLife::Bind(GroupLives* lives, std::vector<int32_t> groups) {
  lives_ = lives;
  groups_ = std::move(groups);
}

void UnitLife::Unbind() {
  lives_ = nullptr;
  groups_.clear();
  SetIdle();
}

void UnitLife::EndForward(bool has_backward) {
  for (size_t i = 0; has_backward && i < groups_.size(); ++i) {
    lives_->RanForward(groups_[i]);
  }
  SetIdle();
}

Status UnitLife::EndBackward() {
  group_ = Training::kPostBackward;
  return ForEach(groups_, [this](int32_t group) { return lives_->Submit(group); });
}

Status UnitLife::Unshard(shardd_phase phase) {
  return ForEach(groups_, [this, phase](int32_t group) {
    return lives_->holds(group) == 0 ? lives_->Unshard(group, phase) : Status();
  });
}

Status UnitLife::Wait() {
  return ForEach(groups_, [this](int32_t group) { return lives_->Wait(group); });
}

Status UnitLife::ReshardAll() {
  return ForEach(groups_, [this](int32_t group) { return lives_->ReshardAll(group); });
}

bool UnitLife::held() const {
  return std::any_of(groups_.begin(), groups_.end(), [this](int32_t group) { return lives_->holds(group) > 0; });
}

void UnitLife::CloseBackward(bool whole, bool stays_unsharded) {
  for (const int32_t group : groups_) {
    if (whole) {
      lives_->EndForward(group);
    }
    lives_->EndBackward(group, stays_unsharded);
  }
  SetIdle();
}

void UnitLife::AbandonBackward() {
  for (const int32_t group : groups_) {
    lives_->AbandonBackward(group);
  }
}

void UnitLife::Forget() {
  for (const int32_t group : groups_) {
    lives_->Forget(group);
  }
  SetIdle();
}

}  // namespace shardd::fsdp
