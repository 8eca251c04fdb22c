#include "client/python/extension/shown_params.h"

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

[[noreturn]] void RaiseChanged(const ManagedParam& param) {
  RaiseAssertion("unshard parameter \"" + param.fqn +
                 "\": FSDP does not support changing the parameters between forward and backward; change it between a "
                 "backward and the next forward");
}

}  // namespace

void ShownParams::Add(std::shared_ptr<ManagedParam> param, std::vector<Place> places) {
  uses_.push_back({std::move(param), std::move(places)});
}

void ShownParams::Borrow(const ShownParams& owner, int daemon_param, std::vector<Place> places) {
  for (const Use& use : owner.stored_uses_) {
    if (use.param->daemon_param == daemon_param) {
      stored_uses_.push_back({use.param, places});
    }
  }
  uses_.push_back({owner.own_.FindParam(daemon_param), std::move(places)});
}

void ShownParams::AddStored(std::shared_ptr<ManagedParam> param) {
  stored_uses_.push_back({std::move(param), uses_.back().places});
}

void ShownParams::Clear() {
  uses_.clear();
  stored_uses_.clear();
}

void ShownParams::Register(bool unsharded) {
  const ManagedParam* changed = nullptr;
  for (const Use& use : uses()) {
    if (!use.param->Register(use.places, unsharded)) {
      changed = use.param.get();
    }
  }
  if (changed != nullptr) {
    RaiseChanged(*changed);
  }
}

void ShownParams::ShowUnsharded(const Job& job) {
  for (const Use& use : uses()) {
    const int param = use.param->daemon_param;
    use.param->PointUnsharded(full_precision_ ? job.shard_data(param) : job.parameter_data(param));
  }
  unsharded_ = true;
  Register(/*unsharded=*/true);
}

const ManagedParam* ShownParams::ShowSharded() {
  const ManagedParam* written = nullptr;
  if (std::exchange(unsharded_, false)) {
    for (const Use& use : uses()) {
      use.param->ClearUnsharded();
      written = use.param->TakeWritten() ? use.param.get() : written;
    }
    if (!std::exchange(shards_shown_, false)) {
      Register(/*unsharded=*/false);
    }
  }
  return written;
}

void ShownParams::Unbind() {
  if (std::exchange(unsharded_, false)) {
    for (const Use& use : uses()) {
      use.param->ClearUnsharded();
      if (!shards_shown_) {
        use.param->Register(use.places, /*unsharded=*/false);
      }
    }
    shards_shown_ = false;
  }
  Clear();
}

void ShownParams::ShowShards() {
  if (unsharded_ && !shards_shown_) {
    Register(/*unsharded=*/false);
    shards_shown_ = true;
  }
}

void ShownParams::HideShards() {
  if (shards_shown_) {
    CheckUnchanged();
    shards_shown_ = false;
    Register(/*unsharded=*/true);
  }
}

void ShownParams::CheckKept() {
  if (modules_have_shards()) {
    return;
  }
  const ManagedParam* changed = nullptr;
  for (const Use& use : uses()) {
    if (!use.param->RestoreUnsharded(use.places)) {
      changed = use.param.get();
    }
  }
  if (changed != nullptr) {
    RaiseChanged(*changed);
  }
}

void ShownParams::CheckUnchanged() const {
  if (!HasChanges()) {
    return;
  }
  std::vector<Change> changes;
  FindChanges(&changes);
  const auto found = std::find_if(own_.params().begin(), own_.params().end(), [&](const auto& param) {
    return !changes.empty() && param->shared_shard() == changes.front().shard;
  });
  RaiseChanged(found == own_.params().end() ? *uses().front().param : **found);
}

bool ShownParams::HasChanges() const {
  const auto restored = [](const auto& shard) { return shard->IsRestored(); };
  if (std::any_of(own_.shards().begin(), own_.shards().end(), restored)) {
    return true;
  }
  const auto replaced = [](const Use& use) {
    HeldShard& shard = use.param->shard();
    return shard.is_plain() && std::any_of(use.places.begin(), use.places.end(), [&shard](const Place& place) {
             PyObject* current = place.current();
             return current != shard.sharded().ptr() && IsParameter(current);
           });
  };
  return modules_have_shards() && std::any_of(uses().begin(), uses().end(), replaced);
}

void ShownParams::FindChanges(std::vector<Change>* changes) const {
  const auto change_of = [changes](const std::shared_ptr<HeldShard>& shard) {
    return std::find_if(changes->begin(), changes->end(), [&](const Change& c) { return c.shard == shard; });
  };
  for (const Use& use : uses()) {
    const std::shared_ptr<HeldShard>& shard = use.param->shared_shard();
    for (const Place& place : use.places) {
      PyObject* current = place.current();
      if (!modules_have_shards() || !shard->is_plain() || current == shard->sharded().ptr() || !IsParameter(current)) {
        continue;
      }
      const auto known = change_of(shard);
      if (known == changes->end()) {
        shard->CheckShape(THPVariable_Unpack(current));
        changes->push_back({shard, py::reinterpret_borrow<py::object>(current)});
      } else if (known->given.ptr() != current) {
        Check(Status(Code::kUnimplemented, "write back parameter \"" + use.param->fqn +
                                               "\": Changing shared parameters is not supported: its modules were "
                                               "given different objects (got 2, want 1)"));
      }
    }
  }
  for (const auto& shard : own_.shards()) {
    if (shard->IsRestored() && change_of(shard) == changes->end()) {
      shard->CheckShape(shard->sharded_tensor());
      changes->push_back({shard, py::object()});
    }
  }
}

void ShownParams::PutObject(py::handle before, py::handle now) const {
  for (const Use& use : uses()) {
    for (const Place& place : use.places) {
      if (place.current() == before.ptr()) {
        place.Put(now);
      }
    }
  }
}

void ShownParams::LoseMemory() {
  for (const auto& param : own_.params()) {
    param->LoseMemory();
  }
  for (const Use& use : stored_uses_) {
    use.param->LoseMemory();
  }
}

}  // namespace shardd::python
