#include "server/history/history_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr char kCurrent[] = "history.jsonl";
constexpr char kPrefix[] = "history-";
constexpr char kSuffix[] = ".jsonl.zst";
// Of a line that is longer than a file is full, all the same.
constexpr uint64_t kMostTextBytes = 4 * HistoryFiles::kFullBytes;

std::string NameOf(int64_t number) { return absl::StrFormat("%s%06d%s", kPrefix, number, kSuffix); }

// Numbers of the compressed files, the newest last.
std::vector<int64_t> Numbers(const std::string& folder) {
  std::vector<int64_t> numbers;
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(folder.c_str()), &closedir);
  if (dir == nullptr) return numbers;
  while (const dirent* const entry = readdir(dir.get())) {
    absl::string_view name = entry->d_name;
    int64_t number = 0;
    if (absl::ConsumePrefix(&name, kPrefix) && absl::ConsumeSuffix(&name, kSuffix) && absl::SimpleAtoi(name, &number) &&
        number > 0) {
      numbers.push_back(number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Empty: it cannot be read.
std::string ReadFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat object {};
  if (!fd.valid() || fstat(fd.get(), &object) != 0 || static_cast<uint64_t>(object.st_size) > kMostTextBytes) return "";
  std::string bytes(static_cast<size_t>(object.st_size), '\0');
  const ssize_t count = pread(fd.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(count < 0 ? 0 : static_cast<size_t>(count));
  return bytes;
}

std::string Decompressed(const std::string& bytes) {
  const auto size = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size > kMostTextBytes) return "";
  std::string text(size, '\0');
  const size_t count = ZSTD_decompress(text.data(), text.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(count) != 0) return "";
  text.resize(count);
  return text;
}

// False: `see` has had enough. What follows the last newline is no line.
bool SeeBackwards(absl::string_view text, absl::FunctionRef<bool(absl::string_view)> see) {
  text = text.substr(0, text.rfind('\n') == absl::string_view::npos ? 0 : text.rfind('\n'));
  while (!text.empty()) {
    const size_t before = text.rfind('\n');
    const absl::string_view line = before == absl::string_view::npos ? text : text.substr(before + 1);
    if (!line.empty() && !see(line)) return false;
    text = text.substr(0, before == absl::string_view::npos ? 0 : before);
  }
  return true;
}

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count = write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::ErrnoToStatus(errno, absl::StrCat("write ", path));
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HistoryFiles> HistoryFiles::Open(std::string folder, int64_t most_bytes) {
  if (most_bytes < 2 * kFullBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("history: too little room (got ", most_bytes, " bytes, want ", 2 * kFullBytes, " at least)"));
  }
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("history: make folder ", folder));
  }
  HistoryFiles files(std::move(folder), most_bytes);
  const std::vector<int64_t> numbers = Numbers(files.folder_);
  files.last_number_ = numbers.empty() ? 0 : numbers.back();
  SHARDD_RETURN_IF_ERROR(files.OpenCurrent());
  // Behind a line that a killed daemon has half written.
  if (files.size_bytes_ > 0) SHARDD_RETURN_IF_ERROR(files.Append("\n"));
  return files;
}

absl::Status HistoryFiles::OpenCurrent() {
  const std::string path = absl::StrCat(folder_, "/", kCurrent);
  current_ = UniqueFd(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  struct stat object {};
  if (!current_.valid() || fstat(current_.get(), &object) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("history: open ", path));
  }
  size_bytes_ = object.st_size;
  return absl::OkStatus();
}

absl::Status HistoryFiles::Append(absl::string_view lines) {
  if (!current_.valid()) SHARDD_RETURN_IF_ERROR(OpenCurrent());
  SHARDD_RETURN_IF_ERROR(WriteAll(current_.get(), lines, absl::StrCat("history: ", folder_, "/", kCurrent)));
  size_bytes_ += static_cast<int64_t>(lines.size());
  return size_bytes_ < kFullBytes ? absl::OkStatus() : Rotate();
}

absl::Status HistoryFiles::Rotate() {
  // Behind a handover two daemons have the folder for a moment.
  if (const std::vector<int64_t> numbers = Numbers(folder_); !numbers.empty()) {
    last_number_ = std::max(last_number_, numbers.back());
  }
  const std::string current = absl::StrCat(folder_, "/", kCurrent);
  const std::string text = ReadFile(current);
  if (text.empty() && size_bytes_ <= static_cast<int64_t>(kMostTextBytes)) {
    // Removed by hand, or there is no descriptor left: what cannot be read is not to be emptied.
    current_ = UniqueFd();
    return absl::UnavailableError(absl::StrCat("history: read ", current, ": it cannot be read now"));
  }
  std::string bytes(ZSTD_compressBound(text.size()), '\0');
  const size_t count = ZSTD_compress(bytes.data(), bytes.size(), text.data(), text.size(), ZSTD_CLEVEL_DEFAULT);
  if (ZSTD_isError(count) != 0) {
    return absl::InternalError(absl::StrCat("history: compress ", current, ": ", ZSTD_getErrorName(count)));
  }
  bytes.resize(count);
  const std::string made = absl::StrCat(folder_, "/", NameOf(last_number_ + 1));
  const std::string half = absl::StrCat(made, ".tmp");
  {
    const UniqueFd fd(open(half.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("history: open ", half));
    SHARDD_RETURN_IF_ERROR(WriteAll(fd.get(), bytes, absl::StrCat("history: ", half)));
  }
  if (rename(half.c_str(), made.c_str()) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("history: make ", made));
  ++last_number_;
  // Whoever is killed before this has these lines twice.
  if (ftruncate(current_.get(), 0) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("history: empty ", current));
  size_bytes_ = 0;
  RemoveOldest();
  return absl::OkStatus();
}

void HistoryFiles::RemoveOldest() {
  std::vector<int64_t> numbers = Numbers(folder_);
  int64_t bytes = kFullBytes;  // of the newest lines
  for (auto it = numbers.rbegin(); it != numbers.rend(); ++it) {
    const std::string path = absl::StrCat(folder_, "/", NameOf(*it));
    struct stat object {};
    if (stat(path.c_str(), &object) == 0) bytes += object.st_size;
    if (bytes > most_bytes_) unlink(path.c_str());
  }
}

bool HistoryFiles::ReadBackwards(const std::string& folder, absl::FunctionRef<bool(absl::string_view line)> see) {
  std::vector<int64_t> numbers;
  std::string newest;
  constexpr int kTries = 3;  // they may become a numbered file meanwhile, and that takes hundreds of steps at least
  for (int i = 0; i < kTries; ++i) {
    numbers = Numbers(folder);
    newest = ReadFile(absl::StrCat(folder, "/", kCurrent));
    if (Numbers(folder) == numbers) break;
  }
  if (!SeeBackwards(newest, see)) return false;
  for (auto it = numbers.rbegin(); it != numbers.rend(); ++it) {
    if (!SeeBackwards(Decompressed(ReadFile(absl::StrCat(folder, "/", NameOf(*it)))), see)) return false;
  }
  return true;
}

}  // namespace shardd
