#ifndef SHARDD_SERVER_SESSION_SESSION_WORDS_H_
#define SHARDD_SERVER_SESSION_SESSION_WORDS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "common/shm/session_view.h"
#include "server/session/told_words.h"

namespace shardd {

class CoreLoop;
class SessionStream;

// The words of a session's pages: what its client waits for, and what its device has signalled. Owns the counts behind
// the words: the daemon never reads its own page back. A client that shares no words is told what they say.
// Loop-confined.
class SessionWords {
 public:
  // The memory behind the views outlives it. Writes the page's first words.
  SessionWords(SessionMemoryView view, DaemonPageView page, uint64_t epoch, int protocol_version);

  int protocol_version() const { return protocol_version_; }

  // From here on `stream` tells what changes. `loop` outlives this.
  void Tell(CoreLoop* loop, std::shared_ptr<SessionStream> stream);
  // Null: the client reads the words themselves.
  ToldWords* told() const { return told_.get(); }

  // The client's device has come to signal `done` (CommandRecord::done). 0: always.
  bool HasDone(uint64_t done) const;

  void PublishVersion(uint64_t version);
  void PublishSlotIssued(int slot);
  void PublishSlotReleased(int slot);
  // POOLED: the client waits for as many as it has asked for, so requests are counted (`asked`), not publications.
  // Where the group will lie, and that it is under way. Then, when it is there, as often as was asked for by then.
  void PublishUnshardIssued(int group, uint64_t asked, int64_t pool_offset_bytes);
  void PublishUnsharded(int group, uint64_t asked);
  void PublishFullParams();
  uint64_t next_full_params() const { return full_params_ + 1; }
  void PublishPass();
  void PublishPassIssued();  // before it, with pass_copies
  // Devices read the state that trainers keep; then they have.
  void PublishSnapshotBegun();
  void PublishSnapshotWhole();
  void PublishHandIn();
  // This rank has closed one more backward; a step that is committed ends the counting of `closed` from 0.
  void CountBackward() { ++backwards_; }
  void EndStepBackwards();
  // `closed` backwards of the running step are closed by all ranks and reduced; those that this rank has closed count.
  void PublishReduced(int closed);
  // The same when all that they add up is with devices.
  void PublishReducing(int closed);
  // In backward `backward` of the running step, of which this rank was not told that it is reduced, some rank gives a
  // gradient of a parameter that this one does not give.
  void PublishOthersGave(int backward);
  // Which backward of the running step comes behind the first `closed` ones of this session; below 0: one of an earlier
  // step.
  int BackwardOfStep(uint64_t closed) const;
  void SetAwake(bool awake);
  // Lets every waiter go: all words move to `epoch`.
  void Poison(uint64_t epoch);

  // The client was let go from a wait: its own time starts again.
  void NoteProgress();
  absl::Time last_progress_time() const { return last_progress_time_; }

 private:
  uint64_t CountClosed(int closed) const;
  const std::atomic<uint32_t>* waiting() const { return &view_.page().waiting; }
  void Store(TimelineWord& word, uint64_t sequence);

  const SessionMemoryView view_;
  const DaemonPageView page_;
  const uint64_t epoch_;
  const int protocol_version_;
  absl::Time last_progress_time_ = absl::InfinitePast();
  bool poisoned_ = false;  // no version is published any more
  uint64_t full_params_ = 0;
  uint64_t passes_ = 0;
  uint64_t passes_issued_ = 0;
  uint64_t snapshots_begun_ = 0;
  uint64_t hand_ins_ = 0;
  uint64_t backwards_ = 0;              // closed
  uint64_t backwards_before_step_ = 0;  // of them, in earlier steps
  uint64_t reduced_ = 0;
  uint64_t reducing_ = 0;
  uint64_t others_gave_ = 0;
  std::vector<uint64_t> released_;  // by slot
  std::vector<uint64_t> issued_;    // by slot
  std::unique_ptr<ToldWords> told_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_SESSION_WORDS_H_
