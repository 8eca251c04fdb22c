#ifndef SHARDD_SERVER_JOB_NODES_MODEL_DIGESTS_H_
#define SHARDD_SERVER_JOB_NODES_MODEL_DIGESTS_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/job/writes/parameter_parts.h"
#include "server/multinode/value_digest.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class Committed;
class CoreLoop;
class JobControl;
class JobMemory;
class JobSlab;
class JobWork;
class NodeMember;
class Snapshot;

// Digests of what this node has of the model, which node 0 compares with those of the other nodes: of values that
// ranks write before they are committed, and of replicas every `compare_every` steps.
//
// Owns the last digests of a version, and how many are being taken. Loop-confined; slabs are read on the worker, which
// takes as long as reading all of the model does, and keeps the job alive.
class ModelDigests {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const JobMemory* memory = nullptr;
    const Committed* committed = nullptr;
    const Snapshot* snapshot = nullptr;  // over nodes what trainers store into is read there; null: in the slabs
  };
  struct Services {
    NodeMember* member = nullptr;
    CoreLoop* worker = nullptr;
    JobWork* work = nullptr;
    JobControl* job = nullptr;
    std::function<void()> promise = nullptr;  // writes down that written values are promised; null: nothing does
    // Keeps what is written before it is promised, and calls `then`; null: nothing does.
    std::function<void(std::function<void()> then)> keep = nullptr;
  };
  // All of both outlive it.
  ModelDigests(Facts facts, Services services) : see_(facts), use_(std::move(services)) {}

  // A step was committed: takes digests of the new version, if those of replicas are due. They are said with the next
  // step, which is not to be decided while they are being taken.
  void StepCommitted();
  bool under_way() const { return under_way_ > 0; }
  // By parameter; empty: none were taken of the committed version or, with an optimizer in the trainers, step.
  const std::vector<uint64_t>& OfCommitted() const;

  // Clears `stale`, and says the digests of values that ranks have written to node 0, if the epoch lasts so long: a
  // promise. `written`: as ValueWrites::written_parts, of which node 0 hears where parameters are cut over nodes.
  // `ended` runs once they are read.
  void SayValues(std::vector<SlabPart> stale, std::vector<uint32_t> written, std::function<void()> ended);

 private:
  using Digests = v1::PeerMessage::Values;
  // Clears and reads on the worker; `done` runs on the loop, and then what may happen next.
  void Take(std::vector<SlabPart> stale, std::vector<uint32_t> written, int64_t snapshot,
            std::function<void(const absl::Status&, Digests)> done);
  // On the worker, while nobody writes the slabs.
  // `snapshot`: where it begins; -1: what the slabs have.
  absl::Status Read(const std::vector<int64_t>& step_counts, const std::vector<uint32_t>& written, int64_t snapshot,
                    Digests* digests) const;
  absl::Status AddBytes(const JobSlab& slab, int64_t offset_bytes, int64_t size_bytes, ValueDigest* digest) const;

  const Facts see_;
  const Services use_;
  uint64_t version_ = 0;
  int64_t step_ = 0;
  int64_t came_ = 0;                // Committed::states_that_came
  std::vector<uint64_t> by_param_;  // of that version
  int under_way_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_MODEL_DIGESTS_H_
