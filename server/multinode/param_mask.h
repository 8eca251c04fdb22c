#ifndef SHARDD_SERVER_MULTINODE_PARAM_MASK_H_
#define SHARDD_SERVER_MULTINODE_PARAM_MASK_H_

// Masks of parameters as messages between nodes carry them: a bit for each, the lowest of a byte first.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/shm/session_view.h"

namespace shardd {

inline std::string MaskOf(const std::vector<bool>& bits) {
  std::string mask(static_cast<size_t>(MaskBytes(static_cast<int64_t>(bits.size()))), '\0');
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) SetMaskBit(reinterpret_cast<uint8_t*>(mask.data()), static_cast<int64_t>(i), true);
  }
  return mask;
}

// False also where the mask is too short: another node has written it.
inline bool HasBit(const std::string& mask, size_t bit) {
  return bit / 8 < mask.size() && MaskBit(reinterpret_cast<const uint8_t*>(mask.data()), static_cast<int64_t>(bit));
}

inline std::vector<bool> BitsOf(const std::string& mask, size_t count) {
  std::vector<bool> bits(count);
  for (size_t i = 0; i < count; ++i) bits[i] = HasBit(mask, i);
  return bits;
}

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_PARAM_MASK_H_
