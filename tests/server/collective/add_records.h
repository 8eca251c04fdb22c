#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_ADD_RECORDS_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_ADD_RECORDS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/shm/sum_ring.h"
#include "common/tensor/kernels.h"

namespace shardd {

// What a rank's library does with the records from number *taken on, up to `end`, with the CPU's kernels, but for
// saying so. slots[r]: where rank r's gradient slots begin.
inline void AddRecords(const SumRing& ring, uint64_t* taken, uint64_t end, const std::vector<const char*>& slots,
                       char* gradients) {
  for (; *taken < end; ++*taken) {
    const SumRecord& r = ring.records[*taken % kSumRecords];
    ASSERT_EQ(r.sequence, *taken);
    char* const dst = gradients + r.dst_offset_bytes;
    if (r.kind == SumKind::kZero) {
      std::fill(dst, dst + r.numel, '\0');
    } else if (r.kind == SumKind::kCopy) {
      std::copy(gradients + r.source_offset_bytes, gradients + r.source_offset_bytes + r.numel, dst);
    } else {
      std::vector<const void*> sources;
      for (size_t rank = 0; rank < slots.size(); ++rank) {
        if ((r.ranks[rank / 64] >> (rank % 64) & 1) != 0) sources.push_back(slots[rank] + r.source_offset_bytes);
      }
      ReduceSources(sources, static_cast<DType>(r.source_dtype), static_cast<DType>(r.reduce_dtype),
                    static_cast<DType>(r.keep), r.scale, r.accumulate != 0, reinterpret_cast<float*>(dst), r.numel);
    }
  }
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_ADD_RECORDS_H_
