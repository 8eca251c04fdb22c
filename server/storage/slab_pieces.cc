#include "server/storage/slab_pieces.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/plan/slab_spread.h"

namespace shardd {
namespace {

constexpr int64_t kFilesOfAPiece = 3;  // with the one that is kept for the custodian
constexpr int64_t kFilesOfARank = 14;  // its session's descriptors and slots, its connections
constexpr int64_t kSpareFiles = 32;    // whoever asks for status, logs, what is under way

}  // namespace

absl::StatusOr<int> PiecesPerSection(const OpenFiles& files, int slabs, int sections, int gpus, int world_size) {
  const int64_t besides = kFilesOfARank * world_size + kSpareFiles;
  const int64_t least = kFilesOfAPiece * slabs * gpus + besides;
  if (files.left() < least) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the daemon may not open as many files as its memory on ", gpus, " GPU(s) and its ", world_size,
                     " rank(s) take (got ", files.left(), " left of ", files.limit, ", want at least ", least,
                     "); raise the daemon's limit of open files (ulimit -n, LimitNOFILE) or close jobs"));
  }
  const int64_t within = (files.left() - besides) / 2 / (kFilesOfAPiece * std::max(1, sections));
  return static_cast<int>(std::min<int64_t>(within, kMaxSlabPieces));
}

}  // namespace shardd
