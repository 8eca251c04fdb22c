#ifndef SHARDD_TESTS_FUZZ_SPEC_INPUT_H_
#define SHARDD_TESTS_FUZZ_SPEC_INPUT_H_

#include <string>

#include "shardd/v1/model.pb.h"

namespace shardd::fuzz {

// Plans `spec`, whatever it is, and aborts the process where a promise of plan.h does not hold: a plan or an error with
// a text, the same both times, memory that is not negative, ranges within their slabs, every element owned once.
// Returns whether there was a plan.
bool CheckPlanOf(const v1::JobSpec& spec);

}  // namespace shardd::fuzz

#endif  // SHARDD_TESTS_FUZZ_SPEC_INPUT_H_
