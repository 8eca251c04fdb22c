#ifndef SHARDD_SERVER_STORAGE_SLAB_PIECES_H_
#define SHARDD_SERVER_STORAGE_SLAB_PIECES_H_

#include "absl/status/statusor.h"
#include "common/shm/open_files.h"

namespace shardd {

// Of how many pieces each of a job's `slabs` on `gpus` GPUs may be made: a piece is an allocation and two descriptors
// of the daemon's (one goes to custodians), which are all counted as open files, so that half of what is left stays for
// other jobs. More pieces are nearer to the GPUs that work on them, and have memory for less of what other nodes hold;
// fewer are right as well. A slab of several sections (MaxPieces) has so many times as much: `sections`, of all slabs.
// Holes count as pieces, as they do for clients (kMaxSlabPieces), and take none of this.
// Fewer than `gpus`, 0 too: one on each GPU, for which there is room all the same. Pure.
// RESOURCE_EXHAUSTED: there are not enough for one piece on each GPU and the job's own sessions.
absl::StatusOr<int> PiecesPerSection(const OpenFiles& files, int slabs, int sections, int gpus, int world_size);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_SLAB_PIECES_H_
