#ifndef SHARDD_SERVER_OBSERVE_LOG_H_
#define SHARDD_SERVER_OBSERVE_LOG_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace shardd {

// Lines to standard error: "2026-11-21T05:31:07.123456Z I 4711 text". Debian 12's Abseil has no absl/log.
// Thread-safe; one write(2) per line, so lines of several threads and processes do not mix. Newlines within `text`
// become spaces. Where standard error is the journal's (JOURNAL_STREAM), a line begins with its level as sd-daemon(3)
// writes it: "<4>". The level comes from SHARDD_LOG_LEVEL (debug, info, warning, error, none) until SetLogLevel is
// called.
enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kNone = 4 };

// False, and nothing changed, for a name that is not listed above.
bool SetLogLevel(absl::string_view name);
void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

// Where standard error is a file: as soon as that is larger than `size_bytes`, all but its last lines are taken away.
// For the log of an embedded daemon, which nobody rotates. 0: it may grow.
void BoundLogFile(int64_t size_bytes);

// Lines that one place in the source writes are limited, whoever makes it write them: kLogBurst at once, and then two a
// second. What is left out is counted, and told with the next line of that place. Lines for debugging are not limited.
inline constexpr int kLogBurst = 200;

// `file`, `line`: the place. Functions that log for others hand on their callers'.
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
