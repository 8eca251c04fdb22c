#ifndef SHARDD_TESTS_SERVER_JOB_PASSES_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_PASSES_FIXTURE_H_

#include "tests/server/job/job_core_fixture.h"

namespace shardd {

// Verbs for the commands with which ranks leave passes and store between them.
class PassesTest : public JobCoreTest {
 protected:
  using JobCoreTest::JobCoreTest;

  void Leave(int rank) {
    v1::Command command;
    command.mutable_leave_pass();
    Send(rank, command);
  }
  // To store.
  void Ask(int rank) {
    v1::Command command;
    command.mutable_hand_in();
    Send(rank, command);
  }
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_PASSES_FIXTURE_H_
