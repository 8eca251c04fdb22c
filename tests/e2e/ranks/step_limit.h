#ifndef SHARDD_TESTS_E2E_RANKS_STEP_LIMIT_H_
#define SHARDD_TESTS_E2E_RANKS_STEP_LIMIT_H_

// Ranks that train until their test has done with them what it wants: no step more, neither of theirs nor of the
// undisturbed run that they are compared with.

#include <cstdint>
#include <string>

#include "tests/e2e/ranks/args.h"

namespace shardd::e2e {

inline constexpr int kUntilEnough = 100'000;  // steps of such ranks, at most
// `args` of ranks that train until SayEnough(path). All of them see that file.
Args UntilEnough(const Args& args, const std::string& path);
void SayEnough(const std::string& path);
// `args` of a run of as many steps as ranks with these, which have ended, have made.
Args AsManySteps(const Args& args);

// In a rank that has trained `trained` steps, before each one: how many it trains, the "steps" of `args`. With
// UntilEnough that is another number when enough has been said, and the same one in all ranks: the first of them fixes
// it two steps ahead or more, and no rank begins the second step behind one that the first has not begun.
int64_t StepsToTrain(Args& args, int64_t trained);

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_STEP_LIMIT_H_
