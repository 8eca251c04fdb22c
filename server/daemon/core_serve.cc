// Whose commands the loop runs, and for how long.

#include <algorithm>
#include <utility>

#include "common/clock/monotonic_now.h"
#include "server/daemon/core.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {
namespace {

constexpr int kLargeBatch = 1024;  // commands
// What a job has of the loop before the next one's turn comes. What a command takes beyond it is not cut, so commands
// are short; it is paid with the turns that follow.
constexpr absl::Duration kTurn = absl::Microseconds(500);

}  // namespace

bool Core::BeforeSleep() {
  bool found = false;
  std::map<uint32_t, int> busy;  // jobs, by uid, that have used up a turn: they share one
  for (const auto& [name, entry] : jobs_) {
    busy[entry.job->identity().owner.uid] += entry.used_turn ? 1 : 0;
  }
  for (auto& [name, entry] : jobs_) {
    found = Serve(entry, kTurn / std::max(1, busy[entry.job->identity().owner.uid])) || found;
  }
  if (found) {
    return true;
  }
  // About to sleep: clients ring the doorbell from here on. Whoever wrote before it saw that is found by the second
  // look.
  for (auto& [name, entry] : jobs_) {
    entry.job->sessions().SetAwake(false);
  }
  for (auto& [name, entry] : jobs_) {
    for (int rank = 0; rank < entry.job->plan()->world_size; ++rank) {
      if (Session* session = entry.job->sessions()[rank].get(); session != nullptr && session->HasCommands()) {
        return true;
      }
    }
  }
  return false;
}

// Deficit round robin: each job's commands, by ring and by stream, for a turn.
bool Core::Serve(Entry& entry, absl::Duration turn) {
  entry.job->sessions().SetAwake(true);
  entry.credit = std::min(entry.credit + turn, turn);
  if (entry.credit <= absl::ZeroDuration()) {
    return !entry.batches.empty();  // rings are looked at before the loop sleeps
  }
  const absl::Time begin = MonotonicNow();
  bool found = entry.job->PollRings(begin + entry.credit);
  found = ExecuteBatches(entry, begin + entry.credit) || found;
  entry.credit -= MonotonicNow() - begin;
  entry.used_turn = entry.credit <= absl::ZeroDuration();
  return found;
}

void Core::SessionCommands(uint64_t session_id, StreamPtr stream, v1::SessionRequest request,
                           std::function<void()> done) {
  auto pending = std::make_shared<PendingBatch>();
  pending->session_id = session_id;
  pending->stream = std::move(stream);
  pending->tells_words = request.has_tell_words();
  pending->batch = std::move(*request.mutable_commands());
  pending->done = std::move(done);
  loop_.Post([this, pending] { AddBatch(pending); });
}

void Core::AddBatch(const std::shared_ptr<PendingBatch>& pending) {
  JobCore* job = nullptr;
  Session* const session = FindSessionOf(pending->session_id, *pending->stream, &job);
  Entry* const entry = session == nullptr ? nullptr : FindEntryOf(*job);
  if (entry == nullptr) {
    EndBatch(pending);
    return;
  }
  entry->batches.Add(pending);
}

bool Core::ExecuteBatches(Entry& entry, absl::Time until) {
  // One that goes on does so behind the others.
  return entry.batches.Take(until, [&](const std::shared_ptr<PendingBatch>& pending) {
    JobCore* job = nullptr;
    Session* session = pending->ask != nullptr ? FindSession(pending->session_id, &job)
                                               : FindSessionOf(pending->session_id, *pending->stream, &job);
    if (session != nullptr && pending->ask != nullptr) {
      pending->ask(*job, *session);
    } else if (session != nullptr && pending->tells_words) {
      if (absl::Status status = session->TellWords(&loop_, job->committed().version()); !status.ok()) {
        session->stream->Finish(std::move(status));
      }
    } else if (session != nullptr && !session->held) {
      pending->next = job->commands().ExecuteFromStream(session, pending->batch, pending->next, until);
      session = FindSessionOf(pending->session_id, *pending->stream, &job);
    }
    if (session == nullptr || pending->next >= pending->batch.commands_size()) {
      EndBatch(pending);
    } else if (session->held) {
      session->when_released.push_back([this, pending] { AddBatch(pending); });
    } else {
      entry.batches.Add(pending);
    }
  });
}

void Core::EndBatch(const std::shared_ptr<PendingBatch>& pending) {
  if (pending->batch.commands_size() > kLargeBatch) {  // freeing a million commands is not the loop's work
    auto gone = std::make_shared<v1::CommandBatch>();
    gone->Swap(&pending->batch);
    reaper_.Post([gone = std::move(gone)] {});
  }
  pending->done();
}

void Core::SessionStreamClosed(uint64_t session_id, StreamPtr stream) {
  loop_.Post([this, session_id, stream = std::move(stream)] {
    JobCore* job = nullptr;
    if (Session* session = FindSessionOf(session_id, *stream, &job); session != nullptr) {
      if (session->held && !session->when_released.empty()) {  // first what it has said before, a detach perhaps
        session->when_released.push_back([this, session_id, stream] { SessionStreamClosed(session_id, stream); });
        return;
      }
      session->stream = nullptr;
      job->SessionLost(session->rank(), "its session stream ended");
    }
  });
}

}  // namespace shardd
