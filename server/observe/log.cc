#include "server/observe/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/process/environment.h"
#include "common/shm/unique_fd.h"

namespace shardd {
namespace {

// A pipe splits the write of lines longer than PIPE_BUF.
constexpr size_t kMaxLineBytes = 4096;

std::optional<LogLevel> ParseLevel(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  if (lower == "debug") return LogLevel::kDebug;
  if (lower == "info") return LogLevel::kInfo;
  if (lower == "warning" || lower == "warn") return LogLevel::kWarning;
  if (lower == "error") return LogLevel::kError;
  if (lower == "none") return LogLevel::kNone;
  return std::nullopt;
}

std::atomic<int>& Threshold() {
  static std::atomic<int> threshold(
      [] { return static_cast<int>(ParseLevel(Environment("SHARDD_LOG_LEVEL")).value_or(LogLevel::kInfo)); }());
  return threshold;
}

std::atomic<int64_t> log_file_bytes{0};

// Whether standard error is what the variable names, or was redirected later. Checked each time: it costs less than
// writing the line.
bool IsJournal() {
  struct stat info {};
  return ::fstat(STDERR_FILENO, &info) == 0 &&
         absl::StrCat(info.st_dev, ":", info.st_ino) == Environment("JOURNAL_STREAM");
}

absl::string_view JournalPrefix(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "<7>";
    case LogLevel::kInfo:
      return "<6>";
    case LogLevel::kWarning:
      return "<4>";
    default:
      return "<3>";
  }
}

// Keeps the last quarter of a file that is too large, from the beginning of a line.
void ShortenLogFile() {
  const int64_t most = log_file_bytes.load(std::memory_order_relaxed);
  struct stat info {};
  if (most == 0 || ::fstat(STDERR_FILENO, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size <= most) {
    return;
  }
  std::string tail(static_cast<size_t>(most / 4), '\0');
  const UniqueFd file(::open("/proc/self/fd/2", O_RDWR | O_APPEND | O_CLOEXEC));
  const ssize_t got = file.valid() ? ::pread(file.get(), tail.data(), tail.size(), info.st_size - most / 4) : -1;
  if (got < 0 || ::ftruncate(file.get(), 0) != 0) {
    return;
  }
  tail.resize(static_cast<size_t>(got));
  tail.erase(0, std::min(tail.find('\n'), tail.size() - 1) + 1);
  (void)!::write(file.get(), tail.data(), tail.size());
  (void)::lseek(STDERR_FILENO, 0, SEEK_END);  // in case it was not opened to append
}

constexpr double kLinesPerSecond = 2;
constexpr size_t kMaxPlaces = 4096;  // kept apart; a hundred bytes each

// Limits the lines of each place, at one level and of one subject. Used under the log's mutex.
class Places {
 public:
  // Negative: drop the line. Otherwise the number of lines dropped since the last one that was not.
  int64_t Admit(const char* file, int line, LogLevel level, int64_t subject, absl::Time now) {
    if (places_.size() >= kMaxPlaces && !places_.contains(Key(file, line, level, subject))) {
      ForgetQuiet(now);
      // Too many subjects at a time: those that come now share what the place itself has.
      subject = places_.size() >= kMaxPlaces ? kNoSubject : subject;
    }
    Place& place = places_.try_emplace(Key(file, line, level, subject), Place{now}).first->second;
    Refill(place, now);
    if (place.allowed < 1) {
      ++place.left_out;
      return -1;
    }
    place.allowed -= 1;
    return std::exchange(place.left_out, 0);
  }

 private:
  using Key = std::tuple<const void*, int, LogLevel, int64_t>;  // by the file's name, which is a constant
  struct Place {
    absl::Time at;
    double allowed = kLogBurst;
    int64_t left_out = 0;
  };
  static void Refill(Place& place, absl::Time now) {
    place.allowed = std::min<double>(
        kLogBurst, place.allowed + kLinesPerSecond * std::max(0.0, absl::ToDoubleSeconds(now - place.at)));
    place.at = now;
  }
  // One that has its whole budget again is as one that has never spoken. At most once a second: it looks at all.
  void ForgetQuiet(absl::Time now) {
    if (now - forgot_ < absl::Seconds(1) && now >= forgot_) {
      return;
    }
    forgot_ = now;
    absl::erase_if(places_, [now](auto& entry) {
      Refill(entry.second, now);
      return entry.second.allowed >= kLogBurst;
    });
  }
  absl::flat_hash_map<Key, Place> places_;
  absl::Time forgot_ = absl::InfinitePast();
};

std::string Line(LogLevel level, absl::Time now, absl::string_view text) {
  std::string line = absl::StrCat(
      IsJournal() ? JournalPrefix(level) : "", absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", now, absl::UTCTimeZone()), " ",
      absl::string_view("DIWE").substr(static_cast<size_t>(level), 1), " ", ::syscall(SYS_gettid), " ");
  const size_t prefix_bytes = line.size();
  line.append(text.data(), std::min(text.size(), kMaxLineBytes - prefix_bytes - 1));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  line.push_back('\n');
  return line;
}

void WriteLine(absl::string_view line) {
  ShortenLogFile();
  // A log that cannot be written is lost, as nobody above can do anything about it. The daemon must not stall because
  // nobody reads its log, so a line that does not fit a pipe is dropped.
  pollfd room = {STDERR_FILENO, POLLOUT, 0};
  while (::poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) != 0) {
    if (::write(STDERR_FILENO, line.data(), line.size()) >= 0 || errno != EINTR) {
      break;
    }
  }
}

}  // namespace

void BoundLogFile(int64_t size_bytes) { log_file_bytes.store(size_bytes, std::memory_order_relaxed); }

bool SetLogLevel(absl::string_view name) {
  const std::optional<LogLevel> level = ParseLevel(name);
  if (level.has_value()) {
    SetLogLevel(*level);
  }
  return level.has_value();
}

void SetLogLevel(LogLevel level) { Threshold().store(static_cast<int>(level), std::memory_order_relaxed); }

bool LogEnabled(LogLevel level) {
  return level != LogLevel::kNone && static_cast<int>(level) >= Threshold().load(std::memory_order_relaxed);
}

void Log(LogLevel level, absl::string_view text, const char* file, int line) {
  LogOf(kNoSubject, level, text, file, line);
}

void LogOf(int64_t subject, LogLevel level, absl::string_view text, const char* file, int line) {
  if (!LogEnabled(level)) {
    return;
  }
  const int saved_errno = errno;
  const absl::Time now = absl::Now();
  static absl::Mutex* const mutex = new absl::Mutex;
  static Places* const places = new Places;
  {
    absl::MutexLock lock(mutex);
    const int64_t left_out = level == LogLevel::kDebug ? 0 : places->Admit(file, line, level, subject, now);
    if (left_out >= 0) {
      if (left_out > 0) {
        WriteLine(Line(level, now, absl::StrCat(left_out, " lines like the next were left out")));
      }
      WriteLine(Line(level, now, text));
    }
  }
  errno = saved_errno;
}

}  // namespace shardd
