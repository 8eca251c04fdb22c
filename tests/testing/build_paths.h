#ifndef SHARDD_TESTS_TESTING_BUILD_PATHS_H_
#define SHARDD_TESTS_TESTING_BUILD_PATHS_H_

// Absolute paths of the build that a test is of. They are constants of one object, not macros of every test's
// compiler's run: ccache then serves a test's object to any checkout.

#include <string>

namespace shardd::built {

extern const std::string kSourceDir;
extern const std::string kDaemon;    // bin/shardd
extern const std::string kCtl;       // bin/shardctl
extern const std::string kLibrary;   // lib/libshardd.so
extern const std::string kFakesDir;  // libcuda.so.1, libnvidia-ml.so.1 and libnccl.so.2 of tests/fakes

}  // namespace shardd::built

#endif  // SHARDD_TESTS_TESTING_BUILD_PATHS_H_
