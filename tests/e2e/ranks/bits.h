#ifndef SHARDD_TESTS_E2E_RANKS_BITS_H_
#define SHARDD_TESTS_E2E_RANKS_BITS_H_

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

// Adds a digest of all bits of the rank's shard of each parameter and of each state that an optimizer has for it: the
// ranks together report everything. To be called when no step is under way.
void ReportBits(const Job& job, TrainerReport* report);

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_BITS_H_
