#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NODE_TURNS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NODE_TURNS_H_

// Whose turn it is where two jobs have the same nodes' GPUs. An operation of NCCL's between nodes holds its GPU until
// all nodes have reached it, so those of two jobs in other orders on two nodes would wait for each other for ever. The
// daemon of node 0 therefore has one turn for both: only the job that has it has operations under way, on any node.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace shardd {

// The jobs of one daemon that NCCL serves over nodes, and which has the turn. On other nodes than 0 it only says who
// may be there. Thread-safe.
class NodeTurns : public std::enable_shared_from_this<NodeTurns> {
 public:
  // What a job knows.
  struct View {
    bool mine = false;    // it has the turn
    bool alone = false;   // there is no other job, or none that has ever wanted the turn
    bool wanted = false;  // the other one wants the turn
    bool operator==(const View&) const = default;
  };
  using Changed = std::function<void(const View&)>;

  // A job's place. Thread-safe, but for Leave beside other calls.
  class Seat {
   public:
    ~Seat() { Leave(); }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    // `changed` runs within this call, and after each change until Leave has returned: on any thread that calls a seat,
    // one at a time. It must call no seat, so whoever calls one holds no lock that `changed` takes.
    void Watch(Changed changed);
    // The job gets the turn when it is free; who has had it last is behind the other. No effect while it has it.
    void Want(bool wants);
    // Gives the turn back, if it has it, and wants it no more.
    void Release();
    // The other job's name; empty: there is none.
    std::string Other() const;
    // Releases. No effect the second time.
    void Leave();

   private:
    friend class NodeTurns;
    Seat(std::shared_ptr<NodeTurns> of, std::string job) : of_(std::move(of)), job_(std::move(job)) {}
    const std::shared_ptr<NodeTurns> of_;
    const std::string job_;
    // Guarded by of_->mutex_.
    Changed changed_;
    bool wants_ = false;
    bool has_wanted_ = false;
    View seen_;
  };

  // FAILED_PRECONDITION: there are two jobs, one of this name, or one over other nodes (`addresses`, by node): then
  // jobs of three daemons could wait for each other in a circle, and two daemons would be node 0.
  absl::StatusOr<std::shared_ptr<Seat>> Enter(const std::string& job, const std::vector<std::string>& addresses)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr size_t kMostJobs = 2;
  // Gives the turn to who wants it, if nobody has it, and tells seats what has changed.
  void SettleLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::vector<Seat*> seats_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);  // of the jobs that are there
  Seat* holder_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Seat* last_ ABSL_GUARDED_BY(mutex_) = nullptr;  // had the turn before; may have left
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NCCL_NODE_TURNS_H_
