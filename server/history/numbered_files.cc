#include "server/history/numbered_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/shm/unique_fd.h"

namespace shardd {
namespace {

constexpr char kPrefix[] = "history-";
constexpr char kSuffix[] = ".jsonl.zst";
constexpr absl::string_view kUid = "\"uid\":";  // quotes within a value are escaped, so this is the member

int64_t SizeOf(const std::string& path) {
  struct stat object {};
  return stat(path.c_str(), &object) == 0 ? object.st_size : 0;
}

// Of root where the line says none.
uint32_t UidOf(absl::string_view line) {
  const size_t at = line.find(kUid);
  if (at == absl::string_view::npos) return 0;
  const absl::string_view digits = line.substr(at + kUid.size());
  uint32_t uid = 0;
  return absl::SimpleAtoi(digits.substr(0, digits.find_first_not_of("0123456789")), &uid) ? uid : 0;
}

}  // namespace

std::vector<int64_t> HistoryNumbers(const std::string& folder) {
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

std::string HistoryPath(const std::string& folder, int64_t number) {
  return absl::StrFormat("%s/%s%06d%s", folder, kPrefix, number, kSuffix);
}

std::string ReadHistoryFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat object {};
  if (!fd.valid() || fstat(fd.get(), &object) != 0 || static_cast<uint64_t>(object.st_size) > kMostHistoryTextBytes) {
    return "";
  }
  std::string bytes(static_cast<size_t>(object.st_size), '\0');
  const ssize_t count = pread(fd.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(count < 0 ? 0 : static_cast<size_t>(count));
  return bytes;
}

std::string ReadHistory(const std::string& folder, int64_t number) {
  const std::string bytes = ReadHistoryFile(HistoryPath(folder, number));
  const auto size = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size > kMostHistoryTextBytes) return "";
  std::string text(size, '\0');
  const size_t count = ZSTD_decompress(text.data(), text.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(count) != 0) return "";
  text.resize(count);
  return text;
}

absl::Status WriteHistory(const std::string& folder, int64_t number, absl::string_view text) {
  const std::string path = HistoryPath(folder, number);
  std::string bytes(ZSTD_compressBound(text.size()), '\0');
  const size_t count = ZSTD_compress(bytes.data(), bytes.size(), text.data(), text.size(), ZSTD_CLEVEL_DEFAULT);
  if (ZSTD_isError(count) != 0) {
    return absl::InternalError(absl::StrCat("history: compress ", path, ": ", ZSTD_getErrorName(count)));
  }
  const std::string half = absl::StrCat(path, ".tmp");
  const UniqueFd fd(open(half.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("history: open ", half));
  absl::Status status;
  for (size_t at = 0; at < count && status.ok();) {
    const ssize_t written = write(fd.get(), bytes.data() + at, count - at);
    if (written > 0) at += static_cast<size_t>(written);
    if (written <= 0 && errno != EINTR) status = absl::ErrnoToStatus(errno, absl::StrCat("history: write ", half));
  }
  if (status.ok() && rename(half.c_str(), path.c_str()) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("history: make ", path));
  }
  if (!status.ok()) unlink(half.c_str());
  return status;
}

void HistoryRoom::Make(const std::string& folder, int64_t most_bytes, int64_t most_text_bytes) {
  for (;;) {
    int64_t bytes = 0;
    const std::vector<int64_t> numbers = HistoryNumbers(folder);
    for (const int64_t number : numbers) bytes += SizeOf(HistoryPath(folder, number));
    if (bytes <= most_bytes || numbers.empty()) return;
    std::map<uint32_t, double> of_user;  // of these bytes
    for (const int64_t number : numbers) {
      const Bytes& lines = BytesOf(folder, number);
      double text = 0;
      for (const auto& [uid, count] : lines) text += static_cast<double>(count);
      const auto size = static_cast<double>(SizeOf(HistoryPath(folder, number)));
      for (const auto& [uid, count] : lines) of_user[uid] += size * static_cast<double>(count) / text;
    }
    const auto most = std::max_element(of_user.begin(), of_user.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    for (size_t i = 0; i < numbers.size(); ++i) {
      const Bytes& lines = BytesOf(folder, numbers[i]);
      if (lines.empty() || (lines.size() == 1 && lines.begin()->first == most->first)) {
        Remove(folder, numbers[i]);
        break;
      }
      if (lines.find(most->first) != lines.end()) {
        Thin(folder, i > 0 ? numbers[i - 1] : 0, numbers[i], most->first, most_text_bytes);
        break;
      }
    }
  }
}

const HistoryRoom::Bytes& HistoryRoom::BytesOf(const std::string& folder, int64_t number) {
  const auto [it, is_new] = known_.try_emplace(number);
  if (is_new) {
    for (const absl::string_view line : absl::StrSplit(ReadHistory(folder, number), '\n', absl::SkipEmpty())) {
      it->second[UidOf(line)] += static_cast<int64_t>(line.size()) + 1;
    }
  }
  return it->second;
}

void HistoryRoom::Thin(const std::string& folder, int64_t before, int64_t number, uint32_t uid,
                       int64_t most_text_bytes) {
  const std::string all = ReadHistory(folder, number);
  std::string text;
  for (const absl::string_view line : absl::StrSplit(all, '\n', absl::SkipEmpty())) {
    if (UidOf(line) != uid) absl::StrAppend(&text, line, "\n");
  }
  std::string joined = before == 0 ? "" : ReadHistory(folder, before);
  const bool joins = !joined.empty() && static_cast<int64_t>(joined.size() + text.size()) <= most_text_bytes;
  if (joins) text.insert(0, joined);
  if (!WriteHistory(folder, number, text).ok()) {
    Remove(folder, before != 0 ? before : number);
    return;
  }
  known_.erase(number);
  if (joins) Remove(folder, before);  // whoever is killed before this has these lines twice
}

void HistoryRoom::Remove(const std::string& folder, int64_t number) {
  unlink(HistoryPath(folder, number).c_str());
  known_.erase(number);
}

}  // namespace shardd
