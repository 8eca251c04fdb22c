#ifndef SHARDD_SERVER_STORAGE_HOST_SLABS_H_
#define SHARDD_SERVER_STORAGE_HOST_SLABS_H_

// How slabs of the host are made, with memory for what the plan says that they hold.

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/plan/slab_spread.h"
#include "server/device/slab_place.h"

namespace shardd {

class JobSlab;
class Slab;

// The slab, for the job's GPUs too where it has some. Errors as of RegisterHost.
absl::StatusOr<std::unique_ptr<JobSlab>> ForGpusToo(const char* name, std::unique_ptr<Slab> slab,
                                                    const SlabPlace& place);

// Allocates and populates slab `which`. Without memory at first: what other nodes hold, gradients of a large job that
// says so (JobConfig.late_gradients), and shards of a snapshot that may be in copies. Blocks. Errors as Slab::Create.
absl::StatusOr<std::unique_ptr<JobSlab>> MakeHostJobSlab(const ShardPlan& plan, SpreadSlab which, const char* name,
                                                         int64_t size_bytes, const SlabPlace& place);

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_HOST_SLABS_H_
