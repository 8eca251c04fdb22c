#include "tests/e2e/versions/records.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/files.h"

namespace shardd::e2e {
namespace {

constexpr char kRecord[] = "SHARDD_RECORD";
// Zeros in between that are cheaper to write than another line.
constexpr size_t kGap = 8;
constexpr size_t kMostInALine = 256;

std::string ToRecord() {
  const char* const version = std::getenv(kRecord);
  return version == nullptr ? "" : version;
}

std::string Folder() { return built::kSourceDir + "/tests/recorded"; }

}  // namespace

std::vector<std::string> RecordedVersions() {
  std::set<std::string> versions;
  if (!ToRecord().empty()) versions.insert(ToRecord());
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    if (entry.is_directory()) versions.insert(entry.path().filename());
  }
  return {versions.begin(), versions.end()};
}

std::string VersionName(const std::string& version) { return absl::StrReplaceAll(version, {{".", "_"}}); }

std::string Recorded(const std::string& version, const std::string& file, const std::function<std::string()>& write) {
  const std::string path = absl::StrCat(Folder(), "/", version, "/", file);
  if (version == ToRecord()) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << "# Of shardd " << version
                        << ". Written by SHARDD_RECORD (tests/recorded/README.md); never changed.\n"
                        << write();
  }
  return testing::ReadWholeFile(path);
}

int64_t Line::number(size_t i) const {
  int64_t value = 0;
  return i < words.size() && absl::SimpleAtoi(words[i], &value) ? value : 0;
}

std::string Line::bytes(size_t i) const { return i < words.size() ? absl::HexStringToBytes(words[i]) : ""; }

std::vector<Line> Lines(const std::string& text) {
  std::vector<Line> lines;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (!absl::StartsWith(line, "#")) lines.push_back({absl::StrSplit(line, ' ')});
  }
  return lines;
}

std::string SparseText(absl::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    if (bytes[at] == 0) {
      ++at;
      continue;
    }
    size_t end = at + 1;  // behind the last byte that is not 0
    for (size_t i = end; i < std::min({bytes.size(), end + kGap, at + kMostInALine}); ++i) {
      if (bytes[i] != 0) end = i + 1;
    }
    absl::StrAppend(&text, "at ", at, " ", absl::BytesToHexString(bytes.substr(at, end - at)), "\n");
    at = end;
  }
  return text;
}

UniqueFd ConnectUnixSocket(const std::string& path, int type) {
  UniqueFd connected(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (connect(connected.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) connected.reset();
  return connected;
}

}  // namespace shardd::e2e
