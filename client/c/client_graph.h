#ifndef SHARDD_CLIENT_C_CLIENT_GRAPH_H_
#define SHARDD_CLIENT_C_CLIENT_GRAPH_H_

// The calls of a job that lie in a CUDA graph: noted once, while the program captures its stream, and made again by the
// host with every launch, while the GPU runs the graph. Where one has to wait for the other they meet in words
// (graph_words.h): the GPU before it writes a gradient slot and before it reads parameters of a new version, the host
// before it submits gradients and closes a backward.

#include <cstdint>
#include <vector>

#include "client/c/graph_words.h"
#include "common/handle/handle.h"

namespace shardd {

struct GraphCall {
  enum class Kind { kUnshard, kWaitUnshard, kReshard, kWaitGradientSlot, kSubmitGradients, kBackwardDone };
  Kind kind;
  int group = -1;
  HandleEvent event = HandleEvent::kUnshardForward;  // kUnshard
  bool last = false;                                 // kBackwardDone
  std::vector<uint8_t> present = {}, fresh = {};     // kSubmitGradients; empty: not given
  int word = -1;                                     // where the two meet; -1: they need not
};

struct JobGraph {
  uint64_t session_id = 0;  // whose gradient slots the captured kernels write
  GraphWords* words = nullptr;
  std::vector<GraphCall> calls;
  std::vector<Handle> handles;    // as the graph begins, and ends
  std::vector<int> slot_holders;  // while it is noted: by slot, the group that may write
  bool awaits_version = false;    // by now
  bool began_closed = false;      // the last backward of the step was, when the graph was begun
  bool last_closed = false;       // by now
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_CLIENT_GRAPH_H_
