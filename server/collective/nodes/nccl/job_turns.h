#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_JOB_TURNS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_JOB_TURNS_H_

// How far a job's nodes may issue sums and moves while it takes turns with another job (node_turns.h). Node 0 says it,
// of what all nodes have ready, so that a turn never waits for anybody's ranks:
//
//   alone:      free -- no limits, no messages
//   wanted:     closing -- all nodes stop, and say how far they are; all go as far as the furthest, and end that
//   afterwards: a turn at a time -- one sum or move that all nodes have ready; all have ended it: the other's turn

#include <cstdint>
#include <optional>
#include <vector>

#include "server/collective/nodes/nccl/node_turns.h"

namespace shardd {

struct TurnCounts {
  uint64_t sums = 0;
  uint64_t moves = 0;
  bool operator==(const TurnCounts&) const = default;
};

// What node 0 says (PeerMessage.Exchange.Turns).
struct TurnLimit {
  uint64_t round = 0;
  bool limited = false;
  TurnCounts below;  // `limited`: the first that may not be issued
};

// What a node says.
struct TurnReport {
  uint64_t round = 0;  // of the limit that it has
  TurnCounts ready;    // the first that it neither has issued nor could issue
  TurnCounts issued;   // the next to issue
  TurnCounts done;     // so many have ended
  bool operator==(const TurnReport&) const = default;
  // Counts that are in no order can only be of a daemon that is broken.
  bool IsPossible() const {
    return done.sums <= issued.sums && issued.sums <= ready.sums && done.moves <= issued.moves &&
           issued.moves <= ready.moves;
  }
};

// Node 0's knowledge of one generation of a job. Thread-compatible.
class JobTurns {
 public:
  enum class State {
    kFree,     // the job has the turn, and nodes issue what is ready
    kClosing,  // limits were said, and not all nodes have said how far they are
    kLimited,  // at most what is below the limit is under way
  };
  // What is to be done next.
  struct Step {
    bool wants = false;              // the turn
    bool releases = false;           // it
    std::optional<TurnLimit> tells;  // to all nodes
    State state = State::kFree;      // from then on
    bool uses = false;               // likewise: its turn has something under way
  };

  explicit JobTurns(int nodes) : reports_(static_cast<size_t>(nodes)) {}
  // A generation's communicators are said to all nodes, and with them this limit, in a turn of the job's. `obeyed`: all
  // nodes know of limits; else none is ever said, and the job keeps its turn.
  TurnLimit Begin(bool alone, bool obeyed = true);
  void OnReport(int node, const TurnReport& report) { reports_[static_cast<size_t>(node)] = report; }
  // False: no node can be there by what it was told.
  bool MayBe(const TurnReport& report) const;
  // `own`: node 0's report as of now.
  Step Next(const NodeTurns::View& view, const TurnReport& own) const;
  // The step is being taken.
  void Take(const Step& step);
  const TurnLimit& limit() const { return limit_; }
  State state() const { return state_; }

 private:
  Step NextOfTurn(const NodeTurns::View& view, const std::vector<const TurnReport*>& nodes) const;
  // The limit with one sum or move more that all nodes have ready; none: there is none.
  std::optional<TurnLimit> OneMore(const TurnCounts& ready, bool sums, bool moves) const;

  std::vector<TurnReport> reports_;  // by node; node 0's is not used
  TurnLimit limit_;
  State state_ = State::kFree;
  bool uses_ = false;
  bool obeyed_ = true;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_JOB_TURNS_H_
