#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_SHOWN_PARAMS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_SHOWN_PARAMS_H_

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "client/cpp/shardd.h"
#include "client/python/extension/managed_param.h"
#include "client/python/extension/unit_gradients.h"

namespace shardd::python {

// What the modules of a unit have in their parameters' places: sharded parameters or unsharded ones, as they are
// computed with or as stored. Owns which of them, and where those places are. Every function needs the GIL.
class ShownParams {
 public:
  // The unit's own parameters; they outlive this.
  explicit ShownParams(const UnitGradients& own) : own_(own) {}
  ShownParams(const ShownParams&) = delete;
  ShownParams& operator=(const ShownParams&) = delete;

  void Add(std::shared_ptr<ManagedParam> param, std::vector<Place> places);
  // A tied parameter of another unit, which modules of this one use too.
  void Borrow(const ShownParams& owner, int daemon_param, std::vector<Place> places);
  // The parameter added last as it is stored, for units that may compute in full precision: shown in its place then.
  void AddStored(std::shared_ptr<ManagedParam> param);
  void Clear();

  // Whether modules are to be shown what is stored. REQUIRES: sharded, where it changes.
  bool FullPrecision(bool wanted) const { return wanted && stored_uses_.size() == uses_.size(); }
  bool is_full_precision() const { return full_precision_; }
  void set_full_precision(bool full_precision) { full_precision_ = full_precision; }
  // It reads what is stored. Units without parameters do not, and leave inputs as they are all the same.
  bool reads_stored() const { return full_precision_ && !uses_.empty(); }
  // Of a unit that may be at full precision, and is not.
  bool reads_casts() const { return !stored_uses_.empty() && !full_precision_; }

  bool unsharded() const { return unsharded_; }
  // Modules have the sharded parameters though the unit is unsharded.
  bool shards_shown() const { return shards_shown_; }
  // From here on modules have the parameters that `job` has unsharded. REQUIRES: sharded.
  void ShowUnsharded(const Job& job);
  // The other way, whatever is shown. Returns a parameter that was written while it was unsharded, into a copy that is
  // gone now; null: none.
  const ManagedParam* ShowSharded();
  // The same where modules are taken apart, so nobody is told of what the program has changed.
  void Unbind();
  // After forward, and before what computes with it again, while the unit is unsharded.
  void ShowShards();
  void HideShards();
  // AssertionError where the program has changed what modules compute with since forward.
  void CheckKept();
  // The same for sharded parameters.
  void CheckUnchanged() const;

  // What the program has done to sharded parameters (engine/changes.cc). Adds what is new to `changes`; raises where it
  // cannot be taken.
  struct Change {
    std::shared_ptr<HeldShard> shard;
    pybind11::object given;  // the parameter in its place; null: the same, in another storage
  };
  bool HasChanges() const;
  void FindChanges(std::vector<Change>* changes) const;
  // Where modules have `before`, they have `now`.
  void PutObject(pybind11::handle before, pybind11::handle now) const;
  // In a forked child, where the job's memory is not mapped.
  void LoseMemory();

 private:
  struct Use {
    std::shared_ptr<ManagedParam> param;
    std::vector<Place> places;
  };
  const std::vector<Use>& uses() const { return full_precision_ ? stored_uses_ : uses_; }
  void Register(bool unsharded);
  bool modules_have_shards() const { return !unsharded_ || shards_shown_; }

  const UnitGradients& own_;
  std::vector<Use> uses_;         // of the unit's own parameters, then borrowed ones
  std::vector<Use> stored_uses_;  // the same as stored; empty: never in full precision
  bool full_precision_ = false;   // what the modules are shown
  bool unsharded_ = false;
  bool shards_shown_ = false;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_SHOWN_PARAMS_H_
