#ifndef SHARDD_SERVER_LOOP_IN_PARALLEL_H_
#define SHARDD_SERVER_LOOP_IN_PARALLEL_H_

#include <cstddef>

#include "absl/functional/function_ref.h"

namespace shardd {

// Calls run(0) to run(count - 1), each once, on as many threads as there are processors, this one among them. Returns
// when all have returned.
void InParallel(size_t count, absl::FunctionRef<void(size_t)> run);

}  // namespace shardd

#endif  // SHARDD_SERVER_LOOP_IN_PARALLEL_H_
