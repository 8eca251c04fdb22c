#ifndef SHARDD_CLIENT_EXAMPLES_GPT_DATA_H_
#define SHARDD_CLIENT_EXAMPLES_GPT_DATA_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

inline constexpr int64_t kVocabulary = 128;  // ASCII

// SplitMix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t state) : state_(state) {}
  uint64_t Next();
  // In [0, 1).
  double NextUniform() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

// The file, or with an empty path all files of /usr/share/common-licenses, each once, in the order of their names.
// Bytes are folded to ASCII. Empty when nothing could be read.
std::string LoadText(const std::string& path);

struct Batch {
  std::vector<int64_t> inputs;   // [batch, context], row-major
  std::vector<int64_t> targets;  // the same, one character on
};
// A pure function of its arguments: a replacement of a rank sees what its predecessor saw.
// REQUIRES: text longer than context + 1.
Batch MakeBatch(const std::string& text, int64_t batch, int64_t context, uint64_t seed, int64_t rank, int64_t index);

}  // namespace gpt

#endif  // SHARDD_CLIENT_EXAMPLES_GPT_DATA_H_
