#ifndef SHARDD_SERVER_TURNS_WORK_OWNER_H_
#define SHARDD_SERVER_TURNS_WORK_OWNER_H_

#include <cstdint>

namespace shardd {

// Whose turn a piece of work takes (turns.h).
struct WorkOwner {
  uint32_t uid = 0;
  uint64_t job = 0;
  friend bool operator<(const WorkOwner& a, const WorkOwner& b) {
    return a.uid != b.uid ? a.uid < b.uid : a.job < b.job;
  }
  friend bool operator==(const WorkOwner& a, const WorkOwner& b) { return a.uid == b.uid && a.job == b.job; }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_TURNS_WORK_OWNER_H_
