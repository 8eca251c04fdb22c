// Parameters that the program has given another storage, or put another object in the place of: between passes their
// values are written into the shards, as PyTorch writes them into its flat parameters.

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

bool Unit::HasChanges() const {
  const auto restored = [](const auto& shard) { return shard->IsRestored(); };
  if (std::any_of(shards_.begin(), shards_.end(), restored)) {
    return true;
  }
  const auto replaced = [](const Use& use) {
    HeldShard& shard = use.param->shard();
    return shard.is_plain() && std::any_of(use.places.begin(), use.places.end(), [&shard](const Place& place) {
             PyObject* current = place.current();
             return current != shard.sharded().ptr() && IsParameter(current);
           });
  };
  return (!unsharded_ || shards_shown_) && std::any_of(uses().begin(), uses().end(), replaced);
}

void Unit::FindChanges(std::vector<Change>* changes) const {
  const auto change_of = [changes](const std::shared_ptr<HeldShard>& shard) {
    return std::find_if(changes->begin(), changes->end(), [&](const Change& c) { return c.shard == shard; });
  };
  for (const Use& use : uses()) {
    const std::shared_ptr<HeldShard>& shard = use.param->shared_shard();
    for (const Place& place : use.places) {
      PyObject* current = place.current();
      if ((unsharded_ && !shards_shown_) || !shard->is_plain() || current == shard->sharded().ptr() ||
          !IsParameter(current)) {
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
  for (const auto& shard : shards_) {
    if (shard->IsRestored() && change_of(shard) == changes->end()) {
      shard->CheckShape(shard->sharded_tensor());
      changes->push_back({shard, py::object()});
    }
  }
}

void Unit::PutObject(py::handle before, py::handle now) const {
  for (const Use& use : uses()) {
    for (const Place& place : use.places) {
      if (place.current() == before.ptr()) {
        place.Put(now);
      }
    }
  }
}

void Engine::TakeChanges() {
  if (full_params_ || std::none_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->HasChanges(); })) {
    return;
  }
  std::vector<Unit::Change> changes;
  for (const Unit* unit : units_) {
    unit->FindChanges(&changes);
  }
  if (!passes_) {
    Check(Status(Code::kFailedPrecondition,
                 "write back parameter \"" + changes.front().shard->fqn +
                     "\": it was given other values, and the job's trainers never write (in_place_edits=False); use "
                     "load_state_dict"));
  }
  WaitForWindow();
  for (const Unit::Change& change : changes) {
    HeldShard& shard = *change.shard;
    if (!change.given) {
      shard.TakeRestored();
      continue;
    }
    const py::object before = py::reinterpret_borrow<py::object>(shard.sharded());
    shard.TakeObject(change.given);
    shard.updated = false;  // an optimizer has the object that it was given
    for (const Unit* unit : units_) {
      unit->PutObject(before, change.given);
    }
    if (!replaced_.is_none()) {
      replaced_(before, change.given);
    }
  }
}

}  // namespace shardd::python
