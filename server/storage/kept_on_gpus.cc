#include "server/storage/kept_on_gpus.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "common/tensor/update_log.h"
#include "server/storage/job_memory.h"
#include "server/storage/kept_pieces.h"
#include "server/storage/old_values_plan.h"

namespace shardd {

absl::StatusOr<OldValuesPlan> PlanOldValues(const ShardPlan& plan, const SlabPlace& place) {
  OldValuesPlan result;
  if (!DaemonUpdates(plan)) return result;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    int64_t numel = 0;
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      if (!plan.flat_params[f].requires_grad) continue;
      for (const Segment& segment : WorkSegments(plan, static_cast<int>(f), rank)) numel += segment.numel;
    }
    result.numel = std::max(result.numel, std::min(numel, kLoggedPieceNumel));
  }
  if (result.numel == 0) return result;
  int64_t page_bytes = 1;
  for (const DeviceMemory* memory : place.users) {
    SHARDD_ASSIGN_OR_RETURN(const int64_t bytes, memory->PageBytes());
    page_bytes = std::max(page_bytes, bytes);  // powers of two
  }
  const int64_t arrays = 1 + plan.optimizer_states;
  const int64_t size_bytes = arrays * result.numel * UpdateLog::kMaxElementBytes;
  result.stride_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    DeviceMemory* const on = place.users[static_cast<size_t>(rank) % place.users.size()];
    if (result.parts.empty() || result.parts.back().on != on) result.parts.push_back({on, 0});
    result.parts.back().size_bytes += result.stride_bytes;
  }
  return result;
}

std::string PieceName(const std::string& slab, size_t piece) { return absl::StrCat(slab, "-", piece); }

void DescribePieces(const std::string& name, const DeviceSlab& slab, CustodySlabs* slabs) {
  v1::CustodySlab* const described = slabs->Add();
  described->set_name(name);
  for (const DeviceSlab::Piece& piece : slab.pieces()) {
    v1::CustodySlab::Piece* const added = described->add_pieces();
    if (piece.on != nullptr) added->set_device_uuid(piece.on->device_uuid());
    added->set_size_bytes(piece.size_bytes);
  }
}

namespace {

const v1::CustodySlab* Described(const std::string& name, const CustodySlabs& slabs) {
  const auto it =
      std::find_if(slabs.begin(), slabs.end(), [&](const v1::CustodySlab& slab) { return slab.name() == name; });
  return it == slabs.end() ? nullptr : &*it;
}

absl::Status CheckKept(const v1::CustodySlab& slab, const KeptFds& kept) {
  for (int i = 0; i < slab.pieces_size(); ++i) {
    if (slab.pieces(i).device_uuid().empty()) continue;
    if (kept.contains(PieceName(slab.name(), static_cast<size_t>(i)))) continue;
    return absl::DataLossError(absl::StrCat("piece ", i, " of its \"", slab.name(), "\" is not there (want ",
                                            slab.pieces_size(),
                                            " pieces): the custodian or the daemon ended while it was handed over"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<DeviceMemory::Part>> PartsOf(const std::string& name, const CustodySlabs& slabs,
                                                        const SlabPlace& place) {
  const v1::CustodySlab* const described = Described(name, slabs);
  if (described == nullptr) return absl::NotFoundError(absl::StrCat("\"", name, "\" is not described"));
  std::vector<DeviceMemory::Part> parts;
  for (const v1::CustodySlab::Piece& piece : described->pieces()) {
    if (piece.device_uuid().empty()) {
      parts.push_back({nullptr, piece.size_bytes()});
      continue;
    }
    const auto on = std::find_if(place.users.begin(), place.users.end(), [&](const DeviceMemory* memory) {
      return memory->device_uuid() == piece.device_uuid();
    });
    if (on == place.users.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("\"", name, "\" lies on a GPU that this daemon does not have for the job's ranks (got UUID ",
                       absl::BytesToHexString(piece.device_uuid()), "); start it with the same --devices"));
    }
    parts.push_back({*on, piece.size_bytes()});
  }
  return parts;
}

absl::Status CheckAllKept(const CustodySlabs& slabs, const KeptFds& kept) {
  for (const v1::CustodySlab& slab : slabs) SHARDD_RETURN_IF_ERROR(CheckKept(slab, kept));
  return absl::OkStatus();
}

void DropPieces(const std::string& name, const CustodySlabs& slabs, KeptFds* kept) {
  const v1::CustodySlab* const described = Described(name, slabs);
  for (int i = 0; described != nullptr && i < described->pieces_size(); ++i) {
    kept->erase(PieceName(name, static_cast<size_t>(i)));
  }
}

absl::StatusOr<KeptFds> DuplicateKept(const KeptFds& kept) {
  KeptFds copies;
  for (const auto& [name, fd] : kept) {
    SHARDD_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(name, fd.get()));
    copies.emplace(name, std::move(copy));
  }
  return copies;
}

absl::StatusOr<std::unique_ptr<DeviceSlab>> TakeUpPieces(const std::string& name, const CustodySlabs& slabs,
                                                         const SlabPlace& place, KeptFds* kept) {
  SHARDD_ASSIGN_OR_RETURN(const std::vector<DeviceMemory::Part> parts, PartsOf(name, slabs, place));
  SHARDD_RETURN_IF_ERROR(CheckKept(*Described(name, slabs), *kept));
  std::vector<UniqueFd> fds;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].on != nullptr) fds.push_back(std::move(kept->extract(PieceName(name, i)).mapped()));
  }
  return place.memory->TakeUpSlab(absl::StrCat("slab \"", name, "\" of the daemon before"), parts, std::move(fds),
                                  place.users);
}

}  // namespace shardd
