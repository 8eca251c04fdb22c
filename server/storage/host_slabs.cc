#include "server/storage/host_slabs.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/plan/pass_copies.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/status/status_macros.h"
#include "server/device/device_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

// As many bytes of gradients come with the first gradients: while trainers still hold the model that they were made
// from, they would be what memory is short of. That there is room for them has been checked, and is (given_back_bytes).
constexpr int64_t kLateGradientsBytes = int64_t{1} << 27;

// What of the slab has memory at first; nothing: all of it.
std::optional<std::vector<Slab::Range>> Populated(const ShardPlan& plan, SpreadSlab which, int64_t size_bytes,
                                                  const SlabPlace& place) {
  static const std::map<SpreadSlab, HeldSlab> kCut = {{SpreadSlab::kShards, HeldSlab::kShards},
                                                      {SpreadSlab::kGradients, HeldSlab::kGradients},
                                                      {SpreadSlab::kOptimizer, HeldSlab::kOptimizer},
                                                      {SpreadSlab::kParameters, HeldSlab::kParameters},
                                                      {SpreadSlab::kKept, HeldSlab::kKept}};
  if (which == SpreadSlab::kKept && place.memory == nullptr && SnapshotMayBeInCopies(plan)) {
    const int64_t states_at_bytes = plan.memory.shards_bytes / kPageBytes * kPageBytes;
    return std::vector<Slab::Range>{{states_at_bytes, RoundUpToPage(size_bytes)}};
  }
  const auto cut = kCut.find(which);
  if (cut == kCut.end() || !HasHoles(plan, cut->second)) return std::nullopt;
  std::vector<Slab::Range> held;
  for (const ByteRange& range : HeldRanges(plan, cut->second)) held.push_back({range.first, range.end});
  return held;
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobSlab>> ForGpusToo(const char* name, std::unique_ptr<Slab> slab,
                                                    const SlabPlace& place) {
  if (place.memory == nullptr) return std::make_unique<JobSlab>(std::move(slab));
  SHARDD_ASSIGN_OR_RETURN(
      std::unique_ptr<PinnedMemory> pinned,
      place.memory->RegisterHost(absl::StrCat("slab \"", name, "\""), slab->data(), slab->size_bytes(), place.users));
  return std::make_unique<JobSlab>(std::move(slab), std::move(pinned));
}

absl::StatusOr<std::unique_ptr<JobSlab>> MakeHostJobSlab(const ShardPlan& plan, SpreadSlab which, const char* name,
                                                         int64_t size_bytes, const SlabPlace& place) {
  const auto populated = Populated(plan, which, size_bytes, place);
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          populated.has_value()
                              ? Slab::CreateParts(name, SlabBacking::kSealedMemfd, size_bytes, *populated)
                              : Slab::Create(name, SlabBacking::kSealedMemfd, size_bytes));
  if (place.memory != nullptr) return ForGpusToo(name, std::move(slab), place);
  if (which == SpreadSlab::kGradients && plan.config.late_gradients() && size_bytes >= kLateGradientsBytes) {
    slab->Discard();
  }
  return std::make_unique<JobSlab>(std::move(slab));
}

}  // namespace shardd
