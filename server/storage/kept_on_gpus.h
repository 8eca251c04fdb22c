#ifndef SHARDD_SERVER_STORAGE_KEPT_ON_GPUS_H_
#define SHARDD_SERVER_STORAGE_KEPT_ON_GPUS_H_

// Slabs on GPUs of jobs that outlive their daemon: each of their pieces is handed over by a name of its own, as
// "shards-3", and the job's description says how large they are and on which GPU (v1::CustodySlab).

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/shm/unique_fd.h"
#include "google/protobuf/repeated_field.h"
#include "server/device/slab_place.h"
#include "shardd/v1/custody.pb.h"

namespace shardd {

class DeviceSlab;

inline constexpr char kUnshardedPoolName[] = "unsharded pool";
inline constexpr char kOldValuesName[] = "old values";

// Of all descriptors that a job's custodian has, by name.
using KeptFds = std::map<std::string, UniqueFd>;
using CustodySlabs = google::protobuf::RepeatedPtrField<v1::CustodySlab>;

std::string PieceName(const std::string& slab, size_t piece);
// Adds the slab's pieces to the description of the job.
void DescribePieces(const std::string& name, const DeviceSlab& slab, CustodySlabs* slabs);
// Takes the slab's descriptors out of `kept`, and maps them. NOT_FOUND: it is not described. DATA_LOSS: a piece of it
// is not there. FAILED_PRECONDITION: it lies on a GPU that is none of `place`.
absl::StatusOr<std::unique_ptr<DeviceSlab>> TakeUpPieces(const std::string& name, const CustodySlabs& slabs,
                                                         const SlabPlace& place, KeptFds* kept);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_KEPT_ON_GPUS_H_
