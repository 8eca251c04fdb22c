#ifndef SHARDD_TESTS_DEADLY_COMMON_TENSOR_LOGGED_BLOCKS_H_
#define SHARDD_TESTS_DEADLY_COMMON_TENSOR_LOGGED_BLOCKS_H_

// In the place of common/tensor/logged_blocks.h: a process may end at each turn of a block, and in the middle of it.

#include <algorithm>
#include <cstdint>

#include "common/process/kept_write.h"
#include "common/tensor/isa_internal.h"
#include "common/tensor/update_log.h"

namespace shardd {

template <typename Save, typename RunBlock>
SHARDD_ALWAYS_INLINE void RunLogged(UpdateLog* log, int64_t first, int64_t numel, Save save, RunBlock run) {
  constexpr int64_t kBlock = UpdateLog::kBlockNumel;
  for (int64_t i = 0; i < numel; i += kBlock) {
    const int64_t count = std::min(kBlock, numel - i);
    const int64_t half = count / 2;
    save(i, count);
    AtKeptWrite();  // kept, and not said
    log->Begun(first + i, count);
    AtKeptWrite();  // said, and nothing changed
    if (half > 0) run(i, half);
    AtKeptWrite();  // torn
    run(i + half, count - half);
    AtKeptWrite();  // changed, and not said
    log->Done(first + i + count);
    AtKeptWrite();
  }
}

}  // namespace shardd

#endif  // SHARDD_TESTS_DEADLY_COMMON_TENSOR_LOGGED_BLOCKS_H_
