#ifndef SHARDD_SERVER_MULTINODE_BACKWARDS_H_
#define SHARDD_SERVER_MULTINODE_BACKWARDS_H_

#include <limits>

namespace shardd {

// How many backwards a rank or a node has closed that has asked for the step: more than any number of them.
inline constexpr int kAllBackwards = std::numeric_limits<int>::max();

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_BACKWARDS_H_
