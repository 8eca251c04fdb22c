#ifndef SHARDD_TESTS_TESTING_PROGRAMS_H_
#define SHARDD_TESTS_TESTING_PROGRAMS_H_

#include <string>

namespace shardd::testing {

// What a test starts or loads: "shardd", "shardd-custodian", "shardd-metrics", "shardctl", "libshardd.so". In the
// folder SHARDD_TEST_BIN where that is set, of the build that this test is of where that is still there, else beside
// this test's own binary: so a test and these can be carried to another machine in one folder.
std::string ProgramPath(const std::string& name);

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_PROGRAMS_H_
