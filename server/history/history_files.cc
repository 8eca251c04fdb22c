#include "server/history/history_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr char kCurrent[] = "history.jsonl";
constexpr std::chrono::seconds kRotateAgain(1);

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
  const std::vector<int64_t> numbers = HistoryNumbers(files.folder_);
  files.last_number_ = numbers.empty() ? 0 : numbers.back();
  // A daemon starts where the disk cannot be written now, as it goes on where that happens later.
  if (const absl::Status opened = files.OpenCurrent(); !opened.ok()) {
    if (access(files.folder_.c_str(), W_OK) == 0 || errno != EROFS) return opened;
    LogWarning(absl::StrCat(opened.message(), "; lines are lost until it can be written"));
  }
  files.half_line_ = files.size_bytes_ > 0;  // of a killed daemon
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
  if (size_bytes_ >= kFullBytes) {  // it was not possible yet, and reads and compresses the whole file
    const auto now = std::chrono::steady_clock::now();
    if (now < rotate_at_) return absl::UnavailableError(absl::StrCat("history: ", folder_, " is full"));
    rotate_at_ = now + kRotateAgain;
    SHARDD_RETURN_IF_ERROR(Rotate());
  }
  const std::string path = absl::StrCat("history: ", folder_, "/", kCurrent);
  absl::Status status = half_line_ ? WriteAll(current_.get(), "\n", path) : absl::OkStatus();
  half_line_ = half_line_ && !status.ok();
  if (status.ok()) status = WriteAll(current_.get(), lines, path);
  if (!status.ok()) {
    half_line_ = true;  // and it is not known how much of one
    current_ = UniqueFd();
    return status;
  }
  size_bytes_ += static_cast<int64_t>(lines.size());
  return size_bytes_ < kFullBytes ? absl::OkStatus() : Rotate();
}

absl::Status HistoryFiles::Rotate() {
  // Behind a handover two daemons have the folder for a moment.
  if (const std::vector<int64_t> numbers = HistoryNumbers(folder_); !numbers.empty()) {
    last_number_ = std::max(last_number_, numbers.back());
  }
  const std::string current = absl::StrCat(folder_, "/", kCurrent);
  const std::string text = ReadHistoryFile(current);
  if (text.empty() && size_bytes_ <= static_cast<int64_t>(kMostHistoryTextBytes)) {
    // Removed by hand, or there is no descriptor left: what cannot be read is not to be emptied.
    current_ = UniqueFd();
    return absl::UnavailableError(absl::StrCat("history: read ", current, ": it cannot be read now"));
  }
  SHARDD_RETURN_IF_ERROR(WriteHistory(folder_, last_number_ + 1, text));
  ++last_number_;
  // Whoever is killed before this has these lines twice.
  if (ftruncate(current_.get(), 0) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("history: empty ", current));
  size_bytes_ = 0;
  room_.Make(folder_, most_bytes_ - kFullBytes, kFullBytes);  // the rest is for the newest lines
  return absl::OkStatus();
}

bool HistoryFiles::ReadBackwards(const std::string& folder, absl::FunctionRef<bool(absl::string_view line)> see) {
  std::vector<int64_t> numbers;
  std::string newest;
  constexpr int kTries = 3;  // they may become a numbered file meanwhile, and that takes hundreds of steps at least
  for (int i = 0; i < kTries; ++i) {
    numbers = HistoryNumbers(folder);
    newest = ReadHistoryFile(absl::StrCat(folder, "/", kCurrent));
    if (HistoryNumbers(folder) == numbers) break;
  }
  if (!SeeBackwards(newest, see)) return false;
  for (auto it = numbers.rbegin(); it != numbers.rend(); ++it) {
    if (!SeeBackwards(ReadHistory(folder, *it), see)) return false;
  }
  return true;
}

}  // namespace shardd
