#include "server/storage/undo_slab.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr int64_t kChunkBytes = kUndoChunkBytes;
constexpr int64_t kPieceChunks = 64;     // of one call: 4 MiB
constexpr int64_t kPieceTags = 1 << 16;  // of one call that finds few

int64_t ChunksOf(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }
int64_t IndexBytes(int64_t chunks) { return ChunksOf(chunks * static_cast<int64_t>(sizeof(uint64_t))) * kChunkBytes; }
int64_t SizeBytes(const ShardPlan& plan) {
  const int64_t chunks = ChunksOf(plan.memory.shards_bytes) + ChunksOf(plan.memory.optimizer_bytes);
  return IndexBytes(chunks) + chunks * kChunkBytes;
}

std::vector<ByteRange> HeldWhereHoles(const ShardPlan& plan, HeldSlab which) {
  return HasHoles(plan, which) ? HeldRanges(plan, which) : std::vector<ByteRange>();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UndoSlab>> UndoSlab::Create(const ShardPlan& plan, Slabs slabs) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          Slab::CreateParts(kUndoName, SlabBacking::kSealedMemfd, SizeBytes(plan), {}));
  return std::unique_ptr<UndoSlab>(new UndoSlab(std::move(slab), plan, slabs));
}

absl::StatusOr<std::unique_ptr<UndoSlab>> UndoSlab::TakeUp(UniqueFd fd, const ShardPlan& plan, Slabs slabs) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::TakeUp(kUndoName, std::move(fd), SizeBytes(plan)));
  std::unique_ptr<UndoSlab> undo(new UndoSlab(std::move(slab), plan, slabs));
  for (int64_t chunk = 0; chunk < undo->chunks_; ++chunk) {
    undo->bytes_ += undo->tag(chunk) == 0 ? 0 : undo->PlaceOf(chunk).size_bytes;
  }
  return undo;
}

UndoSlab::UndoSlab(std::unique_ptr<Slab> slab, const ShardPlan& plan, Slabs slabs)
    : slab_(std::move(slab)),
      slabs_(slabs),
      shards_have_holes_(HasHoles(plan, HeldSlab::kShards)),
      optimizer_has_holes_(HasHoles(plan, HeldSlab::kOptimizer)),
      held_shards_(HeldWhereHoles(plan, HeldSlab::kShards)),
      held_optimizer_(HeldWhereHoles(plan, HeldSlab::kOptimizer)),
      shards_chunks_(ChunksOf(plan.memory.shards_bytes)),
      chunks_(shards_chunks_ + ChunksOf(plan.memory.optimizer_bytes)) {}

UndoSlab::Place UndoSlab::PlaceOf(int64_t chunk) const {
  Place place;
  place.old_bytes = slab_->At<char>(IndexBytes(chunks_) + chunk * kChunkBytes);
  place.slab = chunk < shards_chunks_ ? slabs_.shards : slabs_.optimizer;
  place.offset_bytes = (chunk < shards_chunks_ ? chunk : chunk - shards_chunks_) * kChunkBytes;
  place.size_bytes = std::min(kChunkBytes, place.slab->size_bytes() - place.offset_bytes);
  return place;
}

std::vector<ByteRange> UndoSlab::HeldOf(const Place& place) const {
  const bool of_shards = place.slab == slabs_.shards;
  if (!(of_shards ? shards_have_holes_ : optimizer_has_holes_)) return {{0, place.size_bytes}};
  const std::vector<ByteRange>& held = of_shards ? held_shards_ : held_optimizer_;
  const int64_t end = place.offset_bytes + place.size_bytes;
  std::vector<ByteRange> result;
  const auto behind = [](int64_t at, const ByteRange& range) { return at < range.end; };
  for (auto it = std::upper_bound(held.begin(), held.end(), place.offset_bytes, behind);
       it != held.end() && it->first < end; ++it) {
    result.push_back(
        {std::max(it->first, place.offset_bytes) - place.offset_bytes, std::min(it->end, end) - place.offset_bytes});
  }
  return result;
}

absl::Status UndoSlab::FindChunks(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, int64_t* first,
                                  int64_t* end) const {
  const bool of_shards = slab == slabs_.shards;
  const int64_t base = of_shards ? 0 : shards_chunks_;
  const int64_t end_bytes = offset_bytes + size_bytes;
  if ((!of_shards && slab != slabs_.optimizer) || ChunksOf(end_bytes) > (of_shards ? shards_chunks_ : chunks_ - base)) {
    return absl::InternalError(absl::StrCat("save old bytes: not of the shards or the optimizer state (got bytes ",
                                            offset_bytes, " to ", end_bytes, " of ", slab->size_bytes(), ")"));
  }
  *first = base + offset_bytes / kChunkBytes;
  *end = base + ChunksOf(end_bytes);
  return absl::OkStatus();
}

absl::Status UndoSlab::Save(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, uint64_t version) {
  int64_t first = 0, end = 0;
  SHARDD_RETURN_IF_ERROR(FindChunks(slab, offset_bytes, size_bytes, &first, &end));
  for (int64_t chunk = first; chunk < end; ++chunk) {
    if (tag(chunk) == version + 1) continue;
    const Place place = PlaceOf(chunk);
    const bool is_new = tag(chunk).exchange(0) == 0;
    for (const ByteRange& held : HeldOf(place)) {  // else a hole gets memory here
      SHARDD_RETURN_IF_ERROR(
          place.slab->Read(place.offset_bytes + held.first, place.old_bytes + held.first, held.end - held.first));
    }
    tag(chunk) = version + 1;  // should the daemon end here, the next one finds them, or nothing was written
    bytes_ += is_new ? place.size_bytes : 0;
  }
  return absl::OkStatus();
}

absl::Status UndoSlab::BeginSave(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, uint64_t version,
                                 std::vector<CopyOp>* copies) {
  int64_t first = 0, end = 0;
  SHARDD_RETURN_IF_ERROR(FindChunks(slab, offset_bytes, size_bytes, &first, &end));
  being_saved_.resize(static_cast<size_t>(chunks_));
  CopyOp last = {nullptr, nullptr, 0};
  for (int64_t chunk = first; chunk < end; ++chunk) {
    if (tag(chunk) == version + 1 || being_saved_[static_cast<size_t>(chunk)]) continue;
    const Place place = PlaceOf(chunk);
    bytes_ += tag(chunk).exchange(0) == 0 ? place.size_bytes : 0;
    being_saved_[static_cast<size_t>(chunk)] = true;
    saving_.push_back(chunk);
    for (const ByteRange& held : HeldOf(place)) {  // as in Save
      const char* const from = place.slab->At(place.offset_bytes + held.first);
      if (last.size_bytes > 0 && static_cast<const char*>(last.src) + last.size_bytes == from) {
        last.size_bytes += held.end - held.first;
        continue;
      }
      if (last.size_bytes > 0) copies->push_back(last);
      last = {from, place.old_bytes + held.first, held.end - held.first};
    }
  }
  if (last.size_bytes > 0) copies->push_back(last);
  return absl::OkStatus();
}

void UndoSlab::EndSave(uint64_t version) {
  for (const int64_t chunk : saving_) tag(chunk) = version + 1;
  saving_.clear();
  being_saved_.clear();
}

bool UndoSlab::Has(uint64_t version) const {
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    if (tag(chunk) == version + 1) return true;
  }
  return false;
}

void UndoSlab::Drop(int64_t chunk) {
  const Place place = PlaceOf(chunk);
  tag(chunk) = 0;
  const int64_t at = place.old_bytes - slab_->At<char>(0);
  slab_->Discard({at, at + kChunkBytes});
  bytes_ -= place.size_bytes;
}

absl::Status UndoSlab::PutBack(uint64_t version, bool* more) {
  const int64_t end = std::min(chunks_, next_ + kPieceTags);
  for (int64_t done = 0; next_ < end && done < kPieceChunks; ++next_) {
    if (tag(next_) != version + 1) continue;
    const Place place = PlaceOf(next_);
    for (const ByteRange& held : HeldOf(place)) {
      put_back_.Update(
          place.slab->Write(place.offset_bytes + held.first, place.old_bytes + held.first, held.end - held.first));
    }
    ++done;
  }
  *more = next_ < chunks_;
  if (*more) return absl::OkStatus();
  next_ = 0;
  return std::exchange(put_back_, absl::OkStatus());
}

void UndoSlab::Forget(bool* more) {
  const int64_t end = std::min(chunks_, next_ + kPieceTags);
  for (int64_t done = 0; next_ < end && done < kPieceChunks; ++next_) {
    if (tag(next_) == 0) continue;
    Drop(next_);
    ++done;
  }
  *more = next_ < chunks_;
  if (*more) return;
  next_ = 0;
  slab_->Discard({IndexBytes(chunks_), slab_->size_bytes()});  // also what huge pages have beside them
}

}  // namespace shardd
