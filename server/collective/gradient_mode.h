#ifndef SHARDD_SERVER_COLLECTIVE_GRADIENT_MODE_H_
#define SHARDD_SERVER_COLLECTIVE_GRADIENT_MODE_H_

#include <cstdint>

namespace shardd {

// Per parameter of the group: how the result is combined with the gradient shard.
enum class GradientMode : uint8_t {
  kOverwrite,  // the shard has no valid value: written without zeroing first
  kAccumulate,
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_GRADIENT_MODE_H_
