#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PIECE_CUT_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PIECE_CUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace shardd {

// Cuts a sum of `numel` elements into one piece per node: [Begin(p), End(p)), of whole cache lines except for the last
// non-empty one.
struct PieceCut {
  static constexpr int64_t kAlignNumel = 16;

  int64_t numel = 0;
  int nodes = 1;

  int64_t PieceNumel() const {  // of the largest piece
    const int64_t even = (numel + nodes - 1) / nodes;
    return (even + kAlignNumel - 1) / kAlignNumel * kAlignNumel;
  }
  int64_t Begin(int piece) const { return std::min(numel, piece * PieceNumel()); }
  int64_t End(int piece) const { return std::min(numel, (piece + 1) * PieceNumel()); }
  int64_t Numel(int piece) const { return End(piece) - Begin(piece); }
};

// The pieces of a sum: equal ones, or each node's own (scattered: of the parts of its place, which the nodes with one
// place cut between them).
struct SumPieces {
  bool scattered = false;
  int64_t numel = 0;            // of all
  std::vector<int64_t> begins;  // by node
  std::vector<int64_t> ends;    // likewise

  int64_t Begin(int piece) const { return begins[static_cast<size_t>(piece)]; }
  int64_t End(int piece) const { return ends[static_cast<size_t>(piece)]; }
  int64_t Numel(int piece) const { return End(piece) - Begin(piece); }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PIECE_CUT_H_
