#ifndef SHARDD_SERVER_OBSERVE_LOG_H_
#define SHARDD_SERVER_OBSERVE_LOG_H_

#include "absl/strings/string_view.h"

namespace shardd {

// Lines to standard error: "2026-11-21T05:31:07.123456Z I 4711 text". Debian 12's Abseil has no absl/log.
// Thread-safe; one write(2) per line, so lines of several threads and processes do not mix. Newlines within `text`
// become spaces. The level comes from SHARDD_LOG_LEVEL (debug, info, warning, error, none) until SetLogLevel is called.
enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kNone = 4 };

// False, and nothing changed, for a name that is not listed above.
bool SetLogLevel(absl::string_view name);
void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

void Log(LogLevel level, absl::string_view text);
inline void LogDebug(absl::string_view text) { Log(LogLevel::kDebug, text); }
inline void LogInfo(absl::string_view text) { Log(LogLevel::kInfo, text); }
inline void LogWarning(absl::string_view text) { Log(LogLevel::kWarning, text); }
inline void LogError(absl::string_view text) { Log(LogLevel::kError, text); }

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_LOG_H_
