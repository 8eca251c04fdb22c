#ifndef SHARDD_CLIENT_C_JOB_GRAPHS_H_
#define SHARDD_CLIENT_C_JOB_GRAPHS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/gpu/graph_words.h"
#include "client/c/job/gradients.h"
#include "client/c/job/passes.h"
#include "client/c/job/unsharding.h"

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

// Owns the calls of a job that lie in CUDA graphs. They are noted once, while the program captures its stream; with
// every launch the host makes them again while the GPU runs the graph. The two wait for each other in words
// (graph_words.h): the GPU before it writes a gradient slot and before it reads parameters of a new version, the host
// before it submits gradients and closes a backward. Thread-compatible.
class Graphs {
 public:
  Graphs(Attachment& attachment, HandleSet& handles, Passes& passes, Unsharding& unsharding, Gradients& gradients)
      : attachment_(attachment), handles_(handles), passes_(passes), unsharding_(unsharding), gradients_(gradients) {}
  // Graphs of the former session can only be freed from now on.
  void OnNewSession();

  // These are calls of the C ABI.
  absl::StatusOr<int> Begin();
  absl::Status End();
  absl::Status Launch(int id, void* exec);
  absl::Status Free(int id);

  // True between Begin and End, when calls are noted instead of made.
  bool noting() const { return noted_ != nullptr; }
  absl::Status CheckNotNoting(const char* call) const;

  // Each replaces the call of its name and checks the same. REQUIRES: noting(); group is within the plan.
  absl::Status NoteUnshard(int group, HandleEvent event);
  absl::Status NoteWaitUnshard(int group);
  absl::Status NoteReshard(int group);
  absl::Status NoteWaitGradientSlot(int group);
  absl::Status NoteSubmitGradients(int group, const uint8_t* present, const uint8_t* fresh);
  absl::Status NoteBackwardDone(bool last);

 private:
  struct Graph {
    uint64_t session_id = 0;  // whose gradient slots the captured kernels write
    GraphWords* words = nullptr;
    std::vector<GraphCall> calls;
    std::vector<Handle> handles;    // as the graph begins, and ends
    std::vector<int> slot_holders;  // while it is noted: by slot, the group that may write
    bool awaits_version = false;    // by now
    bool began_closed = false;      // the last backward of the step was, when the graph was begun
    bool last_closed = false;       // by now
  };
  absl::Status Error(const char* call, absl::string_view what) const;
  absl::StatusOr<Graph*> Find(const char* call, int id) const;
  absl::Status CheckLaunch(const Graph& graph) const;
  absl::Status Replay(const GraphCall& call, GraphWords* words);

  Attachment& attachment_;
  HandleSet& handles_;
  Passes& passes_;
  Unsharding& unsharding_;
  Gradients& gradients_;
  std::vector<std::unique_ptr<Graph>> graphs_;  // by number; null: freed
  Graph* noted_ = nullptr;                      // one of them, between Begin and End
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_GRAPHS_H_
