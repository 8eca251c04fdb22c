#ifndef SHARDD_TESTS_E2E_RESIDENT_H_
#define SHARDD_TESTS_E2E_RESIDENT_H_

#include <sys/types.h>

#include <cstdint>
#include <ostream>

namespace shardd::e2e {

// What a process has in memory. Of memory that several map, `Pss` counts the share of each, so that sums over processes
// count every page once.
struct Resident {
  int64_t anonymous_bytes = 0;   // heap, stacks
  int64_t file_pss_bytes = 0;    // its binary and libraries
  int64_t shared_pss_bytes = 0;  // its share of memfds
  int64_t shared_bytes = 0;      // all of the memfds that it maps
  int64_t peak_bytes = 0;        // the most of all of that at any moment, shared memory counted in full
  int64_t pss_bytes() const { return anonymous_bytes + file_pss_bytes + shared_pss_bytes; }
  // At any moment: what it had beside the shared memory that it maps now.
  int64_t peak_of_its_own_bytes() const { return peak_bytes - shared_bytes; }
};
Resident ReadResident(pid_t pid);
std::ostream& operator<<(std::ostream& out, const Resident& resident);

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RESIDENT_H_
