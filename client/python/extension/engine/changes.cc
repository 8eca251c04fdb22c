// Parameters that the program has given another storage, or put another object in the place of: between passes their
// values are written into the shards, as PyTorch writes them into its flat parameters.

#include <algorithm>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Engine::TakeChanges() {
  if (full_params_ ||
      std::none_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->shown().HasChanges(); })) {
    return;
  }
  std::vector<ShownParams::Change> changes;
  for (const Unit* unit : units_) {
    unit->shown().FindChanges(&changes);
  }
  if (!passes_.used()) {
    Check(Status(Code::kFailedPrecondition,
                 "write back parameter \"" + changes.front().shard->fqn +
                     "\": it was given other values, and the job's trainers never write (in_place_edits=False); use "
                     "load_state_dict"));
  }
  LeaveToWrite();
  for (const ShownParams::Change& change : changes) {
    HeldShard& shard = *change.shard;
    if (!change.given) {
      shard.TakeRestored();
      continue;
    }
    const py::object before = py::reinterpret_borrow<py::object>(shard.sharded());
    shard.TakeObject(change.given);
    shard.updated = false;  // an optimizer has the object that it was given
    for (const Unit* unit : units_) {
      unit->shown().PutObject(before, change.given);
    }
    program_.Replaced(before, change.given);
  }
}

}  // namespace shardd::python
