// Which stores of this process reach a session's memory: none once the session is over. Into a private view of the
// shards none does: what was stored is handed in.
// The daemon takes the shards back to the snapshot when a process that may store into them attaches again. From then on
// no store of that process may reach them, neither of its other threads nor through sessions of its other ranks, which
// may not know yet. If the memory were unmapped, such a store would be a fault; a private mapping in its place takes
// it.

#include <errno.h>
#include <string.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/session/session_memory.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

struct Enlisted {
  absl::Mutex mutex;  // before any session's
  std::set<SessionMemory*> sessions ABSL_GUARDED_BY(mutex);
};
Enlisted& All() {
  static auto* const all = new Enlisted;  // outlives sessions that static objects have
  return *all;
}

}  // namespace

void SessionMemory::EnlistStores() {
  absl::MutexLock lock(&All().mutex);
  All().sessions.insert(this);
}

SessionMemory::~SessionMemory() {
  absl::MutexLock lock(&All().mutex);
  All().sessions.erase(this);
}

absl::Status SessionMemory::GiveUpStores() {
  absl::MutexLock lock(&stores_mutex_);
  if (stores_given_up_) {
    return absl::OkStatus();
  }
  const auto give_up = [](const MappedSlab& slab) { return slab.data() == nullptr || slab.MakePrivate(); };
  const bool shards = trainers_write_ && !shards_view_.on();  // no store into a view reaches them
  if (!give_up(gradients_) || (shards && !give_up(shards_)) || (optimizer_writable_ && !give_up(optimizer_))) {
    return absl::InternalError(absl::StrCat(
        "session: take the job's memory back from this process: mmap: ", strerror(errno), " (rank=", rank_, ")"));
  }
  stores_given_up_ = true;
  return absl::OkStatus();
}

absl::Status SessionMemory::GiveUpStoresOfEnded() {
  absl::MutexLock lock(&All().mutex);
  for (SessionMemory* session : All().sessions) {
    if (TimelineEpoch(session->page().epoch.load(std::memory_order_acquire)) > session->epoch_) {
      SHARDD_RETURN_IF_ERROR(session->GiveUpStores());
    }
  }
  return absl::OkStatus();
}

absl::Status SessionMemory::GiveUpStoresBefore(const std::string& job, uint64_t epoch) {
  absl::MutexLock lock(&All().mutex);
  for (SessionMemory* session : All().sessions) {
    if (session->job_ == job && session->epoch_ < epoch) {
      SHARDD_RETURN_IF_ERROR(session->GiveUpStores());
    }
  }
  return absl::OkStatus();
}

absl::Status SessionMemory::HandInShards(int64_t offset_bytes, int64_t size_bytes) {
  absl::MutexLock lock(&stores_mutex_);
  return stores_given_up_ ? absl::OkStatus() : shards_view_.WriteShared(offset_bytes, size_bytes);
}

char* SessionMemory::optimizer() {
  if (device_.has(kFdOptimizer)) {
    return device_.at(kFdOptimizer);
  }
  if (optimizer_fd_.valid()) {
    absl::MutexLock lock(&stores_mutex_);
    if (auto mapped = MappedSlab::Map(std::move(optimizer_fd_), optimizer_bytes_, optimizer_writable_,
                                      /*keep_descriptor=*/true);
        mapped.ok() && (!optimizer_writable_ || !stores_given_up_ || mapped->MakePrivate())) {
      optimizer_ = *std::move(mapped);
    }
    optimizer_fd_.reset();
  }
  return optimizer_.At<char>(0);
}

}  // namespace shardd
