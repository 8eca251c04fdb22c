#ifndef SHARDD_COMMON_TENSOR_LOGGED_BLOCKS_H_
#define SHARDD_COMMON_TENSOR_LOGGED_BLOCKS_H_

// The loop of an update by blocks of its log. For update.cc and update_rules.cc, and a header of its own because
// programs of tests have another loop in its place (tests/deadly), so that this one costs nothing.

#include <cstdint>

#include "common/tensor/isa_internal.h"
#include "common/tensor/update_log.h"

namespace shardd {

// Runs run(element, count) by blocks of the log, each behind save(element, count).
template <typename Save, typename RunBlock>
SHARDD_ALWAYS_INLINE void RunLogged(UpdateLog* log, int64_t first, int64_t numel, Save save, RunBlock run) {
  // A core that works on one such block has the next one's copies on their way, which twice as many keep from it.
  constexpr int64_t kBlock = UpdateLog::kBlockNumel / 2;
  int64_t i = 0;
  for (; i + kBlock <= numel; i += kBlock) {  // of a size that the compiler knows
    save(i, kBlock);
    log->Begun(first + i, kBlock);
    run(i, kBlock);
    log->Done(first + i + kBlock);
  }
  if (i < numel) {
    save(i, numel - i);
    log->Begun(first + i, numel - i);
    run(i, numel - i);
    log->Done(first + numel);
  }
}

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_LOGGED_BLOCKS_H_
