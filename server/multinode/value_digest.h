#ifndef SHARDD_SERVER_MULTINODE_VALUE_DIGEST_H_
#define SHARDD_SERVER_MULTINODE_VALUE_DIGEST_H_

// Whether two daemons have the same bytes: 64 bits, the same on every machine; against mistakes, not attackers. Not
// xxHash, though it is faster: here one word that differs always makes another digest, and this is what daemons of two
// versions compare.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shardd {

// Thread-compatible. Bytes count as one sequence, however they are cut, as long as all cuts but the last are multiples
// of 8 bytes.
class ValueDigest {
 public:
  void Add(const void* data, size_t size) {
    const char* bytes = static_cast<const char*>(data);
    for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), bytes += sizeof(uint64_t)) {
      uint64_t word;
      std::memcpy(&word, bytes, sizeof(word));
      AddWord(word);
    }
    if (size > 0) {
      uint64_t word = 0;
      std::memcpy(&word, bytes, size);
      AddWord(word);
      AddWord(size);
    }
  }
  // Each step is a bijection of the state, so one word that differs always makes another digest.
  void AddWord(uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 32;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_VALUE_DIGEST_H_
