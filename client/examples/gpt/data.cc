#include "client/examples/gpt/data.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>

namespace gpt {

uint64_t Random::Next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::string LoadText(const std::string& path) {
  namespace fs = std::filesystem;
  std::set<std::string> files;  // resolved: several licenses are links to one file
  if (!path.empty()) {
    files.insert(path);
  } else {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator("/usr/share/common-licenses", error)) {
      const fs::path resolved = fs::canonical(entry.path(), error);
      if (!error && fs::is_regular_file(resolved, error)) {
        files.insert(resolved.string());
      }
    }
  }
  std::string text;
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    text.append(std::istreambuf_iterator<char>(stream), {});
  }
  for (char& c : text) {
    c = static_cast<char>(c & 0x7f);
  }
  return text;
}

Batch MakeBatch(const std::string& text, int64_t batch, int64_t context, uint64_t seed, int64_t rank, int64_t index) {
  Random random(seed * 0x2545f4914f6cdd1du + static_cast<uint64_t>(index) * 1000003u + static_cast<uint64_t>(rank));
  Batch result;
  const uint64_t starts = text.size() - static_cast<size_t>(context) - 1;
  for (int64_t row = 0; row < batch; ++row) {
    const size_t start = static_cast<size_t>(random.Next() % starts);
    for (size_t i = start; i < start + static_cast<size_t>(context); ++i) {
      result.inputs.push_back(text[i]);
      result.targets.push_back(text[i + 1]);
    }
  }
  return result;
}

}  // namespace gpt
