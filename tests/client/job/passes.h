#ifndef SHARDD_TESTS_CLIENT_JOB_PASSES_H_
#define SHARDD_TESTS_CLIENT_JOB_PASSES_H_

// Verbs for what trainers do in a pass, for tests of this folder.

#include "tests/client/client_fixture.h"

namespace shardd::testing_client {

// The optimizer runs in the trainers, and has one state.
void StepInTrainers(v1::JobSpec* spec);
// Unshards and reshards all groups, in order.
void Forward(Rank& rank);
enum class Gradients { kAdded, kReplaced };
// Submits `value` for all gradients of a group that is unsharded, and reshards it. kReplaced: as behind zero_grad.
void SubmitGradients(Rank& rank, int group, float value, Gradients gradients);
// Does so for all groups, the last one first. `phase`: of their unshards.
void SubmitAll(Rank& rank, float value, Gradients gradients, shardd_phase phase = SHARDD_BACKWARD);

}  // namespace shardd::testing_client

#endif  // SHARDD_TESTS_CLIENT_JOB_PASSES_H_
