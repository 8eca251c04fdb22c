#ifndef SHARDD_CLIENT_FSDP_GRADIENT_SLOTS_H_
#define SHARDD_CLIENT_FSDP_GRADIENT_SLOTS_H_

#include <cstdint>
#include <vector>

#include "client/cpp/shardd.h"

namespace shardd::fsdp {

// Where the gradient of one parameter of `group` goes.
struct GradientRange {
  const char* begin = nullptr;
  const char* end = nullptr;  // not included
  int32_t group = 0;
};

// Of all parameters that have a gradient.
std::vector<GradientRange> GradientRanges(const Job& job);

// By group: the smallest group in the same gradient slot. Slots are disjoint and groups in one slot all start at its
// beginning, so overlap tells which groups share one. A group without gradients is alone.
std::vector<int32_t> SharedSlots(std::vector<GradientRange> ranges, size_t groups);

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_GRADIENT_SLOTS_H_
