// The ends of a unit: of its job, and of itself.

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

Unit::~Unit() {
  // The last reference may be a graph's, which is freed without the GIL.
  const py::gil_scoped_acquire gil;
  if (engine_ != nullptr) {
    if (engine_->has_memory()) {
      try {
        for (const auto& shard : gradients_.shards()) {  // the program may hold parameters longer than their module
          shard->CopyShardOut();
          shard->ForgetShard();
        }
      } catch (...) {
        // A GPU that is lost: there is nobody to tell.
      }
    }
    engine_->RemoveUnit(this);
  }
  shown_.Clear();
  gradients_.Unbind();
  lazy_init_ = extension_ = py::object();
  engine_.reset();
}

void Unit::Unbind() {
  if (engine_ == nullptr) {
    return;
  }
  shown_.Unbind();
  extension_ = py::object();
  for (const auto& shard : gradients_.shards()) {
    shard->CopyShardOut();
    shard->ForgetShard();
  }
  engine_->RemoveUnit(this);
  gradients_.Unbind();
  life_.Unbind();
  engine_.reset();
}

void Unit::ForgetMemory(bool keeps_gradients) {
  life_.Forget();
  (void)shown_.ShowSharded();
  gradients_.ForgetMemory(keeps_gradients);
  requested_ = graph_kept_ = false;
}

}  // namespace shardd::python
