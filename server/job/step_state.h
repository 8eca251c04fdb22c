#ifndef SHARDD_SERVER_JOB_STEP_STATE_H_
#define SHARDD_SERVER_JOB_STEP_STATE_H_

// What a job knows of its running step, by rank and by gradient: all that an abort drops. Plain data of JobCore.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/multinode/backwards.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// One rank's place in the running step.
struct RankStep {
  int closed_backwards = 0;  // BackwardDone so far; kAllBackwards once stepped
  // Given up by user code, and nothing submitted in them since: what is missing in them is no error.
  std::set<int> abandoned;
  bool stepped = false;
  v1::Step step;
  bool committed_params = false;
  bool finished = false;
  std::optional<bool> pending_detach;  // asked for after Step; its value: finished
  int blocked_slot = -1;               // its client sleeps until this gradient slot is released
  std::vector<std::optional<std::pair<int, int>>> slot_holder;  // by slot: the (backward, group) in it
  // Signals of its device (given_back.h): of BackwardDone by backward, of Step.
  std::vector<uint64_t> done_at_close;
  uint64_t done_at_step = 0;
};
struct Contribution {
  std::vector<bool> present;
  std::vector<bool> fresh;
  uint64_t done = 0;  // the signal with which the slot may be read
};
// The submissions for one (backward, group), by rank and occurrence.
struct Pair {
  std::vector<std::deque<Contribution>> waiting;  // by rank; front: the current occurrence
  std::vector<int> submitted;                     // by rank; without what was taken back
  std::vector<int> added;                         // by rank: of these, in the gradient shards or on the way
  // By rank: of these, of an attempt that it has given up; each stands for one submission to come.
  std::vector<int> stays;
  std::vector<int> folded;       // by rank: occurrences added ahead of their turn, from the current one
  std::vector<uint8_t> touched;  // by index_in_group: written by a part of this occurrence
  std::vector<uint8_t> own;      // by index_in_group: the sum began in this backward, which gave all of it
  int occurrence = 0;            // of the current one
  bool said = false;             // several nodes: to node 0 that it is complete
};
using PairKey = std::pair<int, int>;  // (backward, group)

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_STATE_H_
