#ifndef SHARDD_SERVER_STORAGE_KEPT_PIECES_H_
#define SHARDD_SERVER_STORAGE_KEPT_PIECES_H_

// What the next daemon does with the pieces of a job's slabs on GPUs (kept_on_gpus.h) before it has them.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device_memory.h"
#include "server/storage/kept_on_gpus.h"

namespace shardd {

// Of a slab that is described. NOT_FOUND: it is not. FAILED_PRECONDITION: it lies on a GPU that is none of `place`.
absl::StatusOr<std::vector<DeviceMemory::Part>> PartsOf(const std::string& name, const CustodySlabs& slabs,
                                                        const SlabPlace& place);
// DATA_LOSS: a piece of a slab that is described is not there.
absl::Status CheckAllKept(const CustodySlabs& slabs, const KeptFds& kept);
// The slab is to be made anew, of the same parts: what describes it stays true.
void DropPieces(const std::string& name, const CustodySlabs& slabs, KeptFds* kept);
// For whoever takes them up twice. RESOURCE_EXHAUSTED: there are no more descriptors.
absl::StatusOr<KeptFds> DuplicateKept(const KeptFds& kept);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_KEPT_PIECES_H_
