#include "server/job/writes/write_undo.h"

#include <algorithm>

#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 10;

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

absl::Status WriteUndo::PutBack(absl::FunctionRef<void()> progress) {
  absl::Status status;
  for (const auto& [place, bytes] : chunks_) {
    progress();
    status.Update(place.first->Write(place.second * kChunkBytes, bytes.data(), static_cast<int64_t>(bytes.size())));
  }
  Forget();
  return status;
}

void WriteUndo::Forget() {
  chunks_.clear();
  bytes_ = 0;
}

}  // namespace shardd
