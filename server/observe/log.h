#ifndef SHARDD_SERVER_OBSERVE_LOG_H_
#define SHARDD_SERVER_OBSERVE_LOG_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace shardd {

// Writes lines to standard error: "2026-11-21T05:31:07.123456Z I 4711 text". Debian 12's Abseil has no absl/log.
// Thread-safe; one write(2) per line, so lines of several threads and processes do not mix. Newlines within `text`
// become spaces. If standard error is the journal's (JOURNAL_STREAM), a line begins with its level as sd-daemon(3)
// writes it: "<4>". SHARDD_LOG_LEVEL (debug, info, warning, error, none) sets the level until SetLogLevel is called.
enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kNone = 4 };

// Returns false and changes nothing if the name is not one of the above.
bool SetLogLevel(absl::string_view name);
void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

// If standard error is a file: removes all but its last lines as soon as it is larger than `size_bytes`. For the log of
// an embedded daemon, which nobody rotates. 0: no limit.
void BoundLogFile(int64_t size_bytes);

// Limits the lines of each place in the source, whoever causes them: kLogBurst at once, then two a second. Dropped
// lines are counted and reported with the next line of that place. Debug lines are not limited.
inline constexpr int kLogBurst = 200;

// `file`, `line`: the place. Functions that log for others pass their callers'.
void Log(LogLevel level, absl::string_view text, const char* file = __builtin_FILE(), int line = __builtin_LINE());
inline void LogDebug(absl::string_view text, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Log(LogLevel::kDebug, text, file, line);
}
inline void LogInfo(absl::string_view text, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Log(LogLevel::kInfo, text, file, line);
}
inline void LogWarning(absl::string_view text, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Log(LogLevel::kWarning, text, file, line);
}
inline void LogError(absl::string_view text, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Log(LogLevel::kError, text, file, line);
}

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_LOG_H_
