#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_MAPPED_SLABS_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_MAPPED_SLABS_H_

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/shm/slab.h"
#include "server/storage/job_memory.h"

namespace shardd {

// A job's slabs, mapped for whoever completes what another daemon has left in them.
struct MappedSlabs {
  std::map<std::string, std::unique_ptr<Slab>> by_name;
  char* At(const char* name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second->At<char>(0);
  }
};

// Of all that was handed over, with the sizes of the plan. DATA_LOSS: some of it is not there.
absl::StatusOr<MappedSlabs> MapSlabs(const ShardPlan& plan, const JobMemory::Kept& kept, bool snapshot);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_MAPPED_SLABS_H_
