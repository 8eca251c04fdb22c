#ifndef SHARDD_TESTS_E2E_VERSIONS_RECORDS_H_
#define SHARDD_TESTS_E2E_VERSIONS_RECORDS_H_

// Bytes that releases have sent and left, tests/recorded/<version>/*.txt: lines of words, bytes in hex. Every later
// build reads them. With SHARDD_RECORD=<version> a test first writes its file of that version.

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/shm/unique_fd.h"

namespace shardd::e2e {

// Oldest first, with the one to be written.
std::vector<std::string> RecordedVersions();
// A test's parameter as a part of its name: "0_1_0".
std::string VersionName(const std::string& version);
// Of a version. `write` makes the text where it is to be recorded.
std::string Recorded(const std::string& version, const std::string& file, const std::function<std::string()>& write);

// The words of a line; comments and empty lines are left out.
struct Line {
  std::vector<std::string> words;
  const std::string& word(size_t i) const { return words.at(i); }
  int64_t number(size_t i) const;     // 0 where there is none
  std::string bytes(size_t i) const;  // of hex; "" where there is no such word
};
std::vector<Line> Lines(const std::string& text);

// Bytes with few that are not 0, as lines "at <offset> <hex>".
std::string SparseText(absl::string_view bytes);

// A connected socket of this kind. Invalid where nobody listens at the path.
UniqueFd ConnectUnixSocket(const std::string& path, int type);

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_VERSIONS_RECORDS_H_
