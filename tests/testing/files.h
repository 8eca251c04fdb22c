#ifndef SHARDD_TESTS_TESTING_FILES_H_
#define SHARDD_TESTS_TESTING_FILES_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardd::testing {

// A folder in memory (/dev/shm), removed with everything in it.
class TempDir {
 public:
  TempDir() {
    char pattern[] = "/dev/shm/shardd-test-XXXXXX";
    path_ = mkdtemp(pattern) != nullptr ? pattern : "";
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }
  // Makes the folders that `name` lies in.
  void Write(absl::string_view name, absl::string_view text) const {
    const std::filesystem::path file = File(name);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << std::string(text);
  }

 private:
  std::string path_;
};

// "" where there is none.
inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_FILES_H_
