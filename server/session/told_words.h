#ifndef SHARDD_SERVER_SESSION_TOLD_WORDS_H_
#define SHARDD_SERVER_SESSION_TOLD_WORDS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shardd/v1/trainer.pb.h"

namespace shardd {

class CoreLoop;
class SessionStream;

// Tells a client that shares no words with the daemon what they say (SessionRequest.TellWords). What changes within a
// turn of the loop goes out as one event when the turn ends; the stream merges it into one that still waits, so a
// client that reads slowly costs one event. Owns the numbers of slots, groups and commands as last told. Loop-confined.
class ToldWords {
 public:
  using Words = v1::SessionEvent::Words;

  // `loop` outlives this.
  ToldWords(CoreLoop* loop, std::shared_ptr<SessionStream> stream, int64_t slots, int64_t groups)
      : loop_(loop), next_(std::make_shared<Next>()), slots_(slots), groups_(groups) {
    next_->stream = std::move(stream);
  }

  // The event that goes out next. What is set in it has to be the newest number.
  Words& Change();
  // `change` sets numbers of the slot's or group's entry, which is then told as a whole: events are merged by entry.
  template <typename F>
  void ChangeSlot(int slot, F change) {
    change(slots_[slot]);
    (*Change().mutable_slots())[slot] = slots_[slot];
  }
  template <typename F>
  void ChangeGroup(int group, F change) {
    change(groups_[group]);
    (*Change().mutable_groups())[group] = groups_[group];
  }
  // One more command of the session is executed.
  void CountConsumed() { Change().set_consumed(++consumed_); }

 private:
  // Shared with what was posted to send it, which may run when the session is gone.
  struct Next {
    std::shared_ptr<SessionStream> stream;
    v1::SessionEvent event;
    bool posted = false;
  };

  CoreLoop* const loop_;
  const std::shared_ptr<Next> next_;
  std::vector<Words::Slot> slots_;
  std::vector<Words::Group> groups_;
  uint64_t consumed_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_TOLD_WORDS_H_
