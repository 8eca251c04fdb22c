#include "server/job/writes/initial_values.h"

namespace shardd {

bool InitialValues::Write(int param, int part, uint64_t epoch) {
  const auto [it, first] = written_in_.try_emplace({param, part}, epoch);
  const bool by_another = !first && it->second != epoch;
  it->second = epoch;
  return by_another;
}

std::vector<std::pair<int, int>> InitialValues::WrittenBefore(uint64_t epoch) const {
  std::vector<std::pair<int, int>> parts;
  for (const auto& [part, written_in] : written_in_) {
    if (written_in != epoch) {
      parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace shardd
