#ifndef SHARDD_TESTS_E2E_VERSIONS_BUILDS_H_
#define SHARDD_TESTS_E2E_VERSIONS_BUILDS_H_

// Programs and libraries of several builds, which tests mix (tests/next/README.md).

#include <string>
#include <vector>

#include "common/versions/versions.h"

namespace shardd::e2e {

struct Build {
  std::string folder;  // with `bin` and `lib`
  std::string bin() const { return folder + "/bin"; }
  // For ranks that load its library.
  std::vector<std::string> RankEnvironment() const { return {"LD_LIBRARY_PATH=" + folder + "/lib"}; }
};

Build ThisBuild();
// SHARDD_OTHER_BUILD, a build of another commit; else this one's objects with what the next release might speak.
Build OtherBuild();
bool OtherIsNext();
// Nothing in common with this one.
Build LaterBuild();

// Programs that tests start from here on are the build's; this build's again with its end.
class ProgramsOf {
 public:
  explicit ProgramsOf(const Build& build);
  ~ProgramsOf();
  ProgramsOf(const ProgramsOf&) = delete;
  ProgramsOf& operator=(const ProgramsOf&) = delete;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_VERSIONS_BUILDS_H_
