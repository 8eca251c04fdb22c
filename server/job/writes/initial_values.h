#ifndef SHARDD_SERVER_JOB_WRITES_INITIAL_VALUES_H_
#define SHARDD_SERVER_JOB_WRITES_INITIAL_VALUES_H_

// Which epoch wrote which part of the initial values. These are one epoch's: what an epoch has written that ended
// before its values were committed must not show up in the next one's, so it is cleared before it is written again or
// committed.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace shardd {

// Owns the record of what is written before version 1. Loop-confined.
class InitialValues {
 public:
  // The epoch writes something of the part (parameter_parts.h). True: the whole part has to be cleared first.
  bool Write(int param, int part, uint64_t epoch);
  // The part holds what no epoch has written whole.
  void MarkTorn(int param, int part) { written_in_[{param, part}] = 0; }
  // Parts, with their parameters, that an epoch before this one has written last.
  std::vector<std::pair<int, int>> WrittenBefore(uint64_t epoch) const;
  bool any() const { return !written_in_.empty(); }
  // All parts are the committed version's.
  void Committed() { written_in_.clear(); }

 private:
  std::map<std::pair<int, int>, uint64_t> written_in_;  // epoch, by parameter and part; 0: torn
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_INITIAL_VALUES_H_
