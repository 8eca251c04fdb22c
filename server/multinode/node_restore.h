#ifndef SHARDD_SERVER_MULTINODE_NODE_RESTORE_H_
#define SHARDD_SERVER_MULTINODE_NODE_RESTORE_H_

// The committed state of a job on its way to a node whose daemon lost it: both ends' handling of the bytes.
// A transfer has a number; its slabs come in order, each from its start, so a piece of an earlier transfer, or a hole,
// cannot be taken for part of it.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "common/plan/node_part.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class CoreLoop;
class JobSlab;
class PeerLinks;

// Slab "shards", then slab "optimizer"; null, of no bytes: the plan has none.
struct StateSlab {
  v1::Slab name = v1::SLAB_UNSPECIFIED;
  const JobSlab* slab = nullptr;  // outlives the transfer
  int64_t bytes = 0;              // that are sent, of the plan: a multiple of 4
  int64_t first_bytes = 0;        // where the slab's own offset 0 lies in it
  // Where the slab has holes (HasHoles), which would get memory when they are read: what is sent, one range after the
  // other, which has `bytes` in all. Nodes that hold the same have the same ranges. Empty: one range from offset 0.
  std::vector<ByteRange> held = {};

  // Calls `part` for each piece of the `size_bytes` at `sent_offset` of what is sent that is one range of the slab.
  // Stops at the first error, and returns it. REQUIRES: that is within `bytes`.
  using Part = absl::FunctionRef<absl::Status(int64_t offset, int64_t sent_offset, int64_t size_bytes)>;
  absl::Status ForEach(int64_t sent_offset, int64_t size_bytes, Part part) const;
};
using StateSlabs = std::array<StateSlab, 2>;

// Where it comes to. Thread-safe.
class NodeRestore {
 public:
  // `done` runs once, on the thread of the last piece, or of the first that cannot be.
  NodeRestore(uint64_t transfer, const StateSlabs& slabs, std::function<void(absl::Status)> done);
  uint64_t transfer() const { return transfer_; }
  // A piece, written when it returns: who sends more waits for that. Of another transfer: nothing.
  void Take(const v1::PeerData& header, absl::string_view elements) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t received_bytes() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return received_[0] + received_[1];
  }

 private:
  const uint64_t transfer_;
  const StateSlabs slabs_;
  mutable absl::Mutex mutex_;
  std::function<void(absl::Status)> done_ ABSL_GUARDED_BY(mutex_);  // null: it has run
  std::array<int64_t, 2> received_ ABSL_GUARDED_BY(mutex_) = {};
};

// Where it comes from: a few pieces at a time, read on a worker that it leaves to others in between.
class StateSender : public std::enable_shared_from_this<StateSender> {
 public:
  // `keep` holds slabs and links. Ends when everything was taken by the link, at its first error, or after Cancel;
  // `failed`, on the worker, where a slab cannot be read: who waits for the rest would never hear.
  using Failed = std::function<void(const absl::Status&)>;
  static std::shared_ptr<StateSender> Start(uint64_t transfer, const StateSlabs& slabs, PeerLinks* links, int node,
                                            CoreLoop* worker, Failed failed, std::shared_ptr<void> keep);
  void Cancel() { cancelled_ = true; }

 private:
  StateSender(uint64_t transfer, const StateSlabs& slabs, PeerLinks* links, int node, CoreLoop* worker, Failed failed,
              std::shared_ptr<void> keep)
      : transfer_(transfer),
        slabs_(slabs),
        links_(links),
        node_(node),
        worker_(worker),
        failed_(std::move(failed)),
        keep_(std::move(keep)) {}
  void Run();  // on the worker

  const uint64_t transfer_;
  const StateSlabs slabs_;
  PeerLinks* const links_;
  const int node_;
  CoreLoop* const worker_;
  const Failed failed_;
  const std::shared_ptr<void> keep_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<int> under_way_ = 0;
  // Of the worker.
  size_t slab_ = 0;
  int64_t sent_bytes_ = 0;  // of it
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_RESTORE_H_
