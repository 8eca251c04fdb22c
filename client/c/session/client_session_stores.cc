// Stores of a session that is over. The daemon takes shards back to a kept copy when a process that may store into them
// attaches again: from then on nothing of it may reach them, whatever its other threads do, and its other ranks'
// sessions that it has not looked at yet. Unmapping would be a fault for them; a private mapping in place is none.

#include <errno.h>
#include <string.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "client/c/session/client_session.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

struct Enlisted {
  absl::Mutex mutex;  // before any session's
  std::set<ClientSession*> sessions ABSL_GUARDED_BY(mutex);
};
Enlisted& All() {
  static auto* const all = new Enlisted;  // outlives sessions that static objects have
  return *all;
}

}  // namespace

void ClientSession::EnlistStores() {
  absl::MutexLock lock(&All().mutex);
  All().sessions.insert(this);
}

void ClientSession::DelistStores() {
  absl::MutexLock lock(&All().mutex);
  All().sessions.erase(this);
}

absl::Status ClientSession::GiveUpStores() {
  absl::MutexLock lock(&stores_mutex_);
  if (stores_given_up_) {
    return absl::OkStatus();
  }
  const auto give_up = [](const MappedSlab& slab) { return slab.data() == nullptr || slab.MakePrivate(); };
  if (!give_up(gradients_) || (trainers_write_ && !give_up(shards_)) || (optimizer_writable_ && !give_up(optimizer_))) {
    return absl::InternalError(absl::StrCat(
        "session: take the job's memory back from this process: mmap: ", strerror(errno), " (rank=", rank_, ")"));
  }
  stores_given_up_ = true;
  return absl::OkStatus();
}

absl::Status ClientSession::GiveUpStoresOfEnded() {
  absl::MutexLock lock(&All().mutex);
  for (ClientSession* session : All().sessions) {
    if (TimelineEpoch(session->daemon_page_.page().epoch.load(std::memory_order_acquire)) > session->epoch_) {
      SHARDD_RETURN_IF_ERROR(session->GiveUpStores());
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
