#ifndef SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_SUM_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_SUM_H_

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/collective/nodes/links/peer_exchange.h"

namespace shardd {

// One sum. Guarded by the exchange's mutex, except for what is constant and the elements.
struct PeerExchange::Sum {
  // `places`: nodes of a row (PeerExchange).
  Sum(uint64_t sequence, int nodes, int places, bool scattered, std::vector<NodePart> parts, std::string label,
      Done done)
      : sequence(sequence), parts(std::move(parts)), label(std::move(label)), done(std::move(done)), received(nodes) {
    begins.push_back(0);
    for (const NodePart& part : this->parts) {
      begins.push_back(begins.back() + part.numel);
    }
    cut.scattered = scattered;
    cut.numel = begins.back();
    // The first element of the parts of `place`, or of those behind.
    const auto first_of = [&](int place) {
      const auto behind = std::find_if(this->parts.begin(), this->parts.end(),
                                       [place](const NodePart& part) { return part.node >= place; });
      return begins[static_cast<size_t>(behind - this->parts.begin())];
    };
    for (int piece = 0; piece < nodes; ++piece) {
      const int64_t first = scattered ? first_of(piece % places) : 0;
      const int64_t end = scattered ? first_of(piece % places + 1) : cut.numel;
      const PieceCut even = {.numel = end - first, .nodes = scattered ? nodes / places : nodes};
      const int part = scattered ? piece / places : piece;
      cut.begins.push_back(first + even.Begin(part));
      cut.ends.push_back(first + even.End(part));
    }
  }
  // Scattered: number of other nodes that add pieces.
  int others_with_pieces(int node) const {
    int count = 0;
    for (int piece = 0; piece < static_cast<int>(cut.begins.size()); ++piece) {
      count += piece != node && cut.Numel(piece) > 0 ? 1 : 0;
    }
    return count;
  }
  // True if everything has arrived and this node's own part was added.
  bool IsThere(int node) const {
    return cut.scattered ? added == cut.Numel(node) && others_added == others_with_pieces(node) : summed == cut.numel;
  }

  // The element at `offset` of the concatenated parts.
  float* At(int64_t offset) const {
    const size_t part = PartOf(offset);
    return parts[part].data + (offset - begins[part]);
  }
  // Number of contiguous elements from `offset`, up to `end`.
  int64_t Contiguous(int64_t offset, int64_t end) const { return std::min(begins[PartOf(offset) + 1], end) - offset; }
  void CopyIn(int64_t offset, const char* bytes, int64_t numel) const {
    for (const int64_t end = offset + numel; offset < end;) {
      const int64_t count = Contiguous(offset, end);
      memcpy(At(offset), bytes, static_cast<size_t>(count) * sizeof(float));
      bytes += static_cast<size_t>(count) * sizeof(float);
      offset += count;
    }
  }

  const uint64_t sequence;
  const std::vector<NodePart> parts;
  const std::string label;
  Done done;
  std::vector<int64_t> begins;  // start of each part in the concatenation, and the end
  SumPieces cut;
  bool started = false;
  int64_t added = 0;              // elements of this node's piece
  std::vector<int64_t> received;  // by node: elements of its piece's result
  int64_t summed = 0;             // elements of the result, over all pieces
  int others_added = 0;           // scattered: number of nodes whose piece is added, and is here if it is to be
  int queued = 0;                 // not given to the links yet
  int users = 0;                  // number of threads that touch its parts
  std::optional<absl::Status> ended;

 private:
  size_t PartOf(int64_t offset) const {
    return static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), offset) - begins.begin()) - 1;
  }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_LINKS_PEER_SUM_H_
