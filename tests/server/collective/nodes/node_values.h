#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_VALUES_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_VALUES_H_

#include <cmath>
#include <cstdint>

namespace shardd {

// What a node gives to a sum between nodes: numbers of which fp32 sums are rounded.
inline float NodeValue(int node, int rank, uint64_t sequence, int64_t i) {
  uint64_t x = (static_cast<uint64_t>(node) << 40) ^ (static_cast<uint64_t>(rank) << 32) ^ (sequence << 24) ^
               static_cast<uint64_t>(i);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return static_cast<float>(static_cast<double>(x >> 11) * 0x1p-53 - 0.5);
}
inline void FillNodeValues(int node, int rank, uint64_t sequence, float* data, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) data[i] = NodeValue(node, rank, sequence, i);
}
// How many of them are not the sums over all nodes, up to rounding.
inline int64_t WrongNodeSums(int nodes, int rank, uint64_t sequence, const float* data, int64_t numel) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < numel; ++i) {
    double want = 0;
    for (int node = 0; node < nodes; ++node) want += NodeValue(node, rank, sequence, i);
    wrong += std::abs(want - data[i]) <= nodes * 0x1p-23 ? 0 : 1;
  }
  return wrong;
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_NODE_VALUES_H_
