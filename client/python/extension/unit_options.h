#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_OPTIONS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_OPTIONS_H_

#include <ATen/ATen.h>

namespace shardd::python {

// Attributes of torch's FSDPParamGroup that FSDPModule's methods set, and what a policy says.
struct UnitOptions {
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  bool hybrid = false;  // a 2-D mesh: gradients that are not all-reduced yet are not shown
  bool shows_gradients() const { return reduce_grads && (all_reduce_grads || !hybrid); }
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool reduce_scatter_unused_params = false;
  // Where one parameter of the unit gets a gradient, the others get zero, as in PyTorch's flat parameters.
  bool completes_gradients = false;
  // Backward leaves gradients in memory of this process, and the unit's gradient hook makes the reduced ones of them.
  bool replaces_reduction = false;
  bool reshard_after_forward = true;
  // After its forward modules have the sharded parameters again, which the program knows, also where it stays
  // unsharded.
  bool shows_shards = false;
  bool contributes = true;    // false: zeros are submitted in the place of this rank's gradients
  double gradient_scale = 1;  // of gradients as they are written, beside the job's own factor
  // By which the gradients of parameters on another mesh than the unit's are multiplied, too
  // (ManagedParam::mesh_scale).
  bool scales_by_mesh = true;
  bool cast_inputs = false;
  at::ScalarType param_dtype = at::kFloat;
  bool cast_outputs = false;
  at::ScalarType output_dtype = at::kFloat;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_OPTIONS_H_
