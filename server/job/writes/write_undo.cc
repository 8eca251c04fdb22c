#include "server/job/writes/write_undo.h"

#include <algorithm>

#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 10;
constexpr int kPieceChunks = 64;  // of one call: 4 MiB

}  // namespace

bool WriteUndo::BeginCommit() {
  counts_.clear();
  return std::exchange(saves_, false);
}

bool WriteUndo::BeginUndo(std::vector<int64_t>* update_counts) {
  for (const auto& [param, count] : counts_) {
    (*update_counts)[param] = count;
  }
  counts_.clear();
  if (!std::exchange(saves_, false)) {
    return false;
  }
  undoing_ = true;
  return true;
}

absl::Status WriteUndo::Save(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes) {
  for (int64_t chunk = offset_bytes / kChunkBytes; chunk * kChunkBytes < offset_bytes + size_bytes; ++chunk) {
    if (chunks_.count({slab, chunk}) > 0) {
      continue;
    }
    const int64_t begin = chunk * kChunkBytes;
    const int64_t size = std::min(kChunkBytes, slab->size_bytes() - begin);
    std::string old(static_cast<size_t>(size), '\0');
    SHARDD_RETURN_IF_ERROR(slab->Read(begin, old.data(), size));
    chunks_.emplace(std::pair(slab, chunk), std::move(old));
    bytes_ += size;
  }
  return absl::OkStatus();
}

absl::Status WriteUndo::PutBack(bool* more) {
  for (int i = 0; i < kPieceChunks && !chunks_.empty(); ++i) {
    const auto first = chunks_.begin();
    const auto& [place, bytes] = *first;
    put_back_.Update(place.first->Write(place.second * kChunkBytes, bytes.data(), static_cast<int64_t>(bytes.size())));
    bytes_ -= static_cast<int64_t>(bytes.size());
    chunks_.erase(first);
  }
  *more = !chunks_.empty();
  return *more ? absl::OkStatus() : std::exchange(put_back_, absl::OkStatus());
}

void WriteUndo::Forget(bool* more) {
  for (int i = 0; i < kPieceChunks && !chunks_.empty(); ++i) {
    bytes_ -= static_cast<int64_t>(chunks_.begin()->second.size());
    chunks_.erase(chunks_.begin());
  }
  *more = !chunks_.empty();
}

}  // namespace shardd
