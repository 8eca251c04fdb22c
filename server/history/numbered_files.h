#ifndef SHARDD_SERVER_HISTORY_NUMBERED_FILES_H_
#define SHARDD_SERVER_HISTORY_NUMBERED_FILES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// The compressed files of a history, history-000017.jsonl.zst: higher numbers are newer.
constexpr uint64_t kMostHistoryTextBytes = 16 << 20;  // of one; what is larger cannot be read

// The newest last.
std::vector<int64_t> HistoryNumbers(const std::string& folder);
std::string HistoryPath(const std::string& folder, int64_t number);
// Text of such a file. Empty: it is not there, or damaged.
std::string ReadHistory(const std::string& folder, int64_t number);
// The whole file or none, and nothing takes room where it fails.
absl::Status WriteHistory(const std::string& folder, int64_t number, absl::string_view text);
// Any file as it is. Empty: it cannot be read.
std::string ReadHistoryFile(const std::string& path);

// Makes room in such files, fairly: lines go of the user who has most of the room, his oldest first, so that one user's
// jobs cost another no line before that one has more of it. Files that have become small are joined. Thread-compatible.
class HistoryRoom {
 public:
  // Until the files have `most_bytes` together, as far as they can be read; those that cannot, and where nothing can be
  // written, whole files go, the oldest first. `most_text_bytes`: of files that are joined.
  void Make(const std::string& folder, int64_t most_bytes, int64_t most_text_bytes);

 private:
  using Bytes = std::map<uint32_t, int64_t>;  // of text, by uid
  const Bytes& BytesOf(const std::string& folder, int64_t number);
  // Without lines of `uid`, and joined with the file before, if both are small.
  void Thin(const std::string& folder, int64_t before, int64_t number, uint32_t uid, int64_t most_text_bytes);
  void Remove(const std::string& folder, int64_t number);

  std::map<int64_t, Bytes> known_;  // by number
};

}  // namespace shardd

#endif  // SHARDD_SERVER_HISTORY_NUMBERED_FILES_H_
