#ifndef SHARDD_SERVER_MULTINODE_REPLICA_DIGESTS_H_
#define SHARDD_SERVER_MULTINODE_REPLICA_DIGESTS_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace shardd {

// Digests of what this node has at some version, which node 0 compares with those of its replicas. Owns the last ones,
// and how many are being taken. Loop-confined.
class ReplicaDigests {
 public:
  // The step is not decided while they are being taken.
  bool under_way() const { return under_way_ > 0; }
  void Begin() { ++under_way_; }
  void Taken(uint64_t version, std::vector<uint64_t> by_param) {
    --under_way_;
    version_ = version;
    by_param_ = std::move(by_param);
  }
  void Failed() { --under_way_; }
  // By parameter; empty: none were taken at that version.
  const std::vector<uint64_t>& At(uint64_t version) const {
    static const auto* const kNone = new std::vector<uint64_t>();
    return version == version_ ? by_param_ : *kNone;
  }

 private:
  uint64_t version_ = 0;
  std::vector<uint64_t> by_param_;
  int under_way_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_REPLICA_DIGESTS_H_
