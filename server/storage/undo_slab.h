#ifndef SHARDD_SERVER_STORAGE_UNDO_SLAB_H_
#define SHARDD_SERVER_STORAGE_UNDO_SLAB_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "common/shm/slab.h"
#include "common/shm/unique_fd.h"
#include "server/device/device_op.h"

namespace shardd {

class JobSlab;

inline constexpr char kUndoName[] = "undo";

// Old bytes of a job's shards and optimizer state, while trainers write values that no version has yet: what this
// daemon, or the next one, puts back if none comes to have them. It lies on the host, and pages come as they are
// needed.
//
//   [0, index):   u64 by chunk of 64 KiB, first of the shards, then of the optimizer state: 1 + the version of which
//                 the chunk's old bytes are; 0: there are none
//   [index, end): the old bytes, each chunk at a place of its own
//
// Old bytes count in their version alone, so a commit makes them void before it forgets them. Where parameters are cut
// over nodes nothing but what this one holds is saved or put back (HeldChunksBytes).
//
// Immutable but for the bytes. One thread at a time calls Save, PutBack and Forget; bytes() is thread-safe.
class UndoSlab {
 public:
  // Both outlive this, and have the bytes of `plan`. `optimizer` null: there is none.
  struct Slabs {
    const JobSlab* shards = nullptr;
    const JobSlab* optimizer = nullptr;
  };
  static absl::StatusOr<std::unique_ptr<UndoSlab>> Create(const ShardPlan& plan, Slabs slabs);
  // Of the daemon before. DATA_LOSS: it is something else.
  static absl::StatusOr<std::unique_ptr<UndoSlab>> TakeUp(UniqueFd fd, const ShardPlan& plan, Slabs slabs);

  int fd() const { return slab_->fd(); }
  // Keeps each chunk once in a version, as it is before the first write.
  absl::Status Save(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, uint64_t version);
  // The same by copies that others make at a time: adds to `copies` those of the chunks that are not kept yet, each
  // once until EndSave, which makes them count. REQUIRES: both slabs are on the host; nothing else of this is called
  // between.
  absl::Status BeginSave(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, uint64_t version,
                         std::vector<CopyOp>* copies);
  void EndSave(uint64_t version);
  // There are old bytes of this version.
  bool Has(uint64_t version) const;
  // Both do a piece of a few milliseconds and set *more if they are to be called again. PutBack writes the old bytes of
  // the version, also behind an error; the last call returns the first error. They count until Forget, so whoever dies
  // in between leaves them to the next.
  absl::Status PutBack(uint64_t version, bool* more);
  void Forget(bool* more);
  int64_t bytes() const { return bytes_; }

 private:
  UndoSlab(std::unique_ptr<Slab> slab, const ShardPlan& plan, Slabs slabs);
  std::atomic<uint64_t>& tag(int64_t chunk) const { return slab_->At<std::atomic<uint64_t>>(0)[chunk]; }
  // A chunk's place here, the slab that it is of, and the place there.
  struct Place {
    char* old_bytes = nullptr;
    const JobSlab* slab = nullptr;
    int64_t offset_bytes = 0;
    int64_t size_bytes = 0;
  };
  Place PlaceOf(int64_t chunk) const;
  // The chunks [*first, *end) that have these bytes. INTERNAL: they are not of the two slabs.
  absl::Status FindChunks(const JobSlab* slab, int64_t offset_bytes, int64_t size_bytes, int64_t* first,
                          int64_t* end) const;
  // The bytes of it that are held: at which offset of the chunk, and how many.
  std::vector<ByteRange> HeldOf(const Place& place) const;
  void Drop(int64_t chunk);

  const std::unique_ptr<Slab> slab_;
  const Slabs slabs_;
  // Where they have holes (HasHoles), what this node holds of each.
  const bool shards_have_holes_;
  const bool optimizer_has_holes_;
  const std::vector<ByteRange> held_shards_;
  const std::vector<ByteRange> held_optimizer_;
  const int64_t shards_chunks_;
  const int64_t chunks_;
  std::atomic<int64_t> bytes_ = 0;
  int64_t next_ = 0;               // of PutBack and Forget: the chunk to look at
  absl::Status put_back_;          // the first error
  std::vector<int64_t> saving_;    // chunks of BeginSave
  std::vector<bool> being_saved_;  // by chunk; empty: none
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_UNDO_SLAB_H_
