#include "tests/e2e/versions/builds.h"

#include <cstdlib>
#include <filesystem>

#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

constexpr char kPrograms[] = "SHARDD_TEST_BIN";  // tests/testing/programs.h
constexpr char kOther[] = "SHARDD_OTHER_BUILD";

}  // namespace

Build ThisBuild() {
  static const std::string& folder =
      *new std::string(std::filesystem::path(testing::ProgramPath("shardd")).parent_path().parent_path());
  return {folder};
}

bool OtherIsNext() { return std::getenv(kOther) == nullptr; }

Build OtherBuild() { return OtherIsNext() ? Build{ThisBuild().folder + "/next"} : Build{std::getenv(kOther)}; }

Build LaterBuild() { return {ThisBuild().folder + "/later"}; }

ProgramsOf::ProgramsOf(const Build& build) {
  ThisBuild();  // known from before
  setenv(kPrograms, build.bin().c_str(), 1);
}

ProgramsOf::~ProgramsOf() { setenv(kPrograms, ThisBuild().bin().c_str(), 1); }

}  // namespace shardd::e2e
