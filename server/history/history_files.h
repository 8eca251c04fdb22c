#ifndef SHARDD_SERVER_HISTORY_HISTORY_FILES_H_
#define SHARDD_SERVER_HISTORY_HISTORY_FILES_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/shm/unique_fd.h"
#include "server/history/numbered_files.h"

namespace shardd {

// Lines in files of bounded size, of which the oldest of the user with the most go:
//
//   history.jsonl             the newest lines, as text
//   history-000017.jsonl.zst  older ones, compressed when the file before was full; higher numbers are newer
//
// Nothing is lost by a kill but a line that is half written. Thread-compatible; a reader may be another process, or
// another thread.
class HistoryFiles {
 public:
  static constexpr int64_t kFullBytes = 4 << 20;  // of text in one file

  // Makes the folder (mode 0700) where there is none. `most_bytes`: of all files together, at least 2 * kFullBytes.
  static absl::StatusOr<HistoryFiles> Open(std::string folder, int64_t most_bytes);

  // `lines` end with a newline each. What fails, as on a full disk, leaves the files as they were, but for a part of
  // the text, which costs no later line. Where older lines cannot be compressed, no newer ones are taken: the bound
  // holds.
  absl::Status Append(absl::string_view lines);

  // Shows every line, the newest first, until `see` returns false. Files that are damaged or vanish meanwhile are
  // passed over. Returns whether it came to the end.
  static bool ReadBackwards(const std::string& folder, absl::FunctionRef<bool(absl::string_view line)> see);

 private:
  HistoryFiles(std::string folder, int64_t most_bytes) : folder_(std::move(folder)), most_bytes_(most_bytes) {}
  absl::Status OpenCurrent();
  absl::Status Rotate();

  std::string folder_;
  int64_t most_bytes_;
  UniqueFd current_;
  int64_t size_bytes_ = 0;
  HistoryRoom room_;
  bool half_line_ = false;  // what failed may have left one
  int64_t last_number_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_HISTORY_HISTORY_FILES_H_
