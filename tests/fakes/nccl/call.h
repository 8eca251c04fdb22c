#ifndef SHARDD_TESTS_FAKES_NCCL_CALL_H_
#define SHARDD_TESTS_FAKES_NCCL_CALL_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace shardd::nccl {

// One call of a member: what it sends, and where the sum goes if it is the root, or all are.
struct Call {
  bool scatters = false;  // of a reduce-scatter, which symmetric kernels do
  bool all = false;       // of an all-reduce; no root
  const float* send = nullptr;
  float* receive = nullptr;
  size_t count = 0;
  int root = 0;
  bool moves = false;  // to the root or from it, whose call is the other half; `count` bytes, and nothing is added
  bool operator==(const Call& other) const {
    return scatters == other.scatters && all == other.all && count == other.count && root == other.root;
  }
};

// Of an all-reduce the ring ends elsewhere for every piece of so many elements.
inline constexpr size_t kRingPieceNumel = size_t{1} << 14;

// To `sum`, along the ring: of the piece at `offset` of the call, `sends` by member.
inline void AddPiece(const Call& call, size_t offset, const std::vector<const float*>& sends, float* sum) {
  const size_t members = sends.size();
  const size_t end = call.all ? offset / kRingPieceNumel : static_cast<size_t>(call.root);
  const size_t numel = std::min(kRingPieceNumel, call.count - offset);
  for (size_t hop = 1; hop <= members; ++hop) {
    const float* const from = sends[(end + hop) % members];
    for (size_t k = 0; k < numel; ++k) sum[k] += from[k];
  }
}

}  // namespace shardd::nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_CALL_H_
