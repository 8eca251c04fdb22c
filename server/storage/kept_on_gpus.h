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
#include "server/device/device.h"
#include "server/device/device_memory.h"
#include "shardd/v1/custody.pb.h"

namespace shardd {

inline constexpr char kUnshardedPoolName[] = "unsharded pool";
inline constexpr char kOldValuesName[] = "old values";

// How many elements an update by a GPU changes at a time, where it is logged: their old values are copied to another
// place of that GPU, and a stop of the stream is paid for, once for each. By the bytes that it moves, the update takes
// (28 + 24) / 28 of the time that it takes without a log (AdamW in fp32). Pieces of 4 Mi are some 70 us of a GPU of 3
// TB/s, beside which six more launches are some 10; the place of a rank is 48 MiB. Smaller ones would stay in the
// GPU's cache, but be mostly launches. Not measured on a GPU yet.
inline constexpr int64_t kLoggedPieceNumel = int64_t{4} << 20;

// The memory for old values of a job's ranks: each on the rank's GPU, in the order of ranks.
struct OldValuesPlan {
  int64_t numel = 0;  // of a piece; 0: nothing is updated
  int64_t stride_bytes = 0;
  std::vector<DeviceMemory::Part> parts;
};
absl::StatusOr<OldValuesPlan> PlanOldValues(const ShardPlan& plan, const SlabPlace& place);

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
