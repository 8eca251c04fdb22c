#ifndef SHARDD_COMMON_FQN_FQN_H_
#define SHARDD_COMMON_FQN_FQN_H_

#include <string>

#include "absl/strings/string_view.h"

namespace shardd {

// Removes every wrapper component from a dotted name: leading "module" components, and anywhere "_fsdp_wrapped_module",
// "_checkpoint_wrapped_module", "_orig_mod" and "_flat_param". Idempotent.
// "module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight" -> "layers.0.weight".
std::string CleanFqn(absl::string_view name);

// "a.b" + "c" -> "a.b.c"; "" + "c" -> "c".
std::string JoinFqn(absl::string_view prefix, absl::string_view name);

}  // namespace shardd

#endif  // SHARDD_COMMON_FQN_FQN_H_
