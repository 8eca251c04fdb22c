#include "tests/testing/programs.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <system_error>

#include "tests/testing/build_paths.h"

namespace shardd::testing {

std::string ProgramPath(const std::string& name) {
  if (const char* const folder = getenv("SHARDD_TEST_BIN"); folder != nullptr && *folder != '\0') {
    return std::string(folder) + "/" + name;
  }
  static const auto& built =
      *new std::map<std::string, std::string>{{"shardd", built::kDaemon},
                                              {"shardd-custodian", built::kDaemon + "-custodian"},
                                              {"shardd-metrics", built::kDaemon + "-metrics"},
                                              {"shardctl", built::kCtl},
                                              {"libshardd.so", built::kLibrary}};
  const std::string path = built.at(name);
  if (access(path.c_str(), F_OK) == 0) return path;
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / name;
}

}  // namespace shardd::testing
