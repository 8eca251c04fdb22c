#ifndef SHARDD_CLIENT_C_SESSION_SESSION_MEMORY_H_
#define SHARDD_CLIENT_C_SESSION_SESSION_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/c/gpu/device_slabs.h"
#include "client/c/session/told_words.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/private_view.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/shm/trace_ring.h"

namespace shardd {

// Owns what a session maps: its own memory (page, ring, masks, gradient slots), the daemon's page and the job's slabs,
// on the host or on a GPU. Where the first two are not shared with the daemon, memory of this process stands in their
// place. Decides whether stores of this process reach the slabs. Thread-compatible, except where noted.
class SessionMemory {
 public:
  SessionMemory(uint64_t epoch, int rank) : epoch_(epoch), rank_(rank) {}
  ~SessionMemory();
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  // Maps the session's memory and the daemon's page out of its descriptors. Of this and MakeOwnWords one comes first.
  absl::Status MapWords(std::vector<UniqueFd>& fds, const v1::AttachRankResponse& attach, const ShardPlan& plan);
  // FAILED_PRECONDITION: a job of that plan does not go without shared words.
  static absl::Status CheckOwnWords(const ShardPlan& plan);
  // Makes both of memory of this process alone, for a session whose words are told, and returns what stores them.
  // `job`: as of GiveUpStoresBefore. FAILED_PRECONDITION: the daemon, or the job, does not go without shared words.
  absl::StatusOr<ToldWords> MakeOwnWords(const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                         int protocol_version, const std::string& job);
  // Maps the other descriptors, and further pieces that `fetch` gets. REQUIRES: called once.
  absl::Status MapSlabs(std::vector<UniqueFd> fds, const v1::AttachRankResponse& attach, const ShardPlan& plan,
                        const DeviceSlabs::Fetch& fetch);

  const DaemonPage& page() const { return daemon_page_.page(); }
  const ReadOnlyDaemonPageView& daemon_page() const { return daemon_page_; }
  const SessionMemoryView& view() const { return view_; }
  const MappedSlab& session_slab() const { return session_slab_; }
  const MappedSlab& daemon_slab() const { return daemon_slab_; }
  int doorbell() const { return doorbell_.get(); }
  bool own_words() const { return !job_.empty(); }  // MakeOwnWords
  TraceRecord* trace_ring() const { return trace_ring_; }

  // The pointers below are the host's, or the GPU's if on_device(). With offload, shards, gradients and optimizer lie
  // on the host all the same.
  const char* shards() const { return bases_.shards; }
  const char* parameters() const { return bases_.parameters; }  // nullptr: none
  const char* pool() const { return bases_.pool; }              // nullptr: none
  char* gradients() const { return bases_.gradients; }          // nullptr: none
  char* gradient_slots() const { return bases_.gradient_slots; }
  bool on_device() const { return !device_.empty(); }
  const DeviceSlabs& device() const { return device_; }
  // Maps the slab with the first call, because most trainers never look. Returns nullptr if there is none, or on
  // failure.
  char* optimizer();
  const MappedSlab& shards_slab() const { return shards_; }
  const MappedSlab& parameters_slab() const { return parameters_; }  // may be empty
  const MappedSlab& optimizer_slab() const { return optimizer_; }    // empty until optimizer() was called

  // The view of jobs that hand in what is stored into shards (edits.h); else it is not on().
  PrivateView& shards_view() { return shards_view_; }
  // Copies these bytes of the view into the shards that all see; nothing once stores are given up. REQUIRES:
  // shards_view().on(), and the daemon lets this rank hand in.
  absl::Status HandInShards(int64_t offset_bytes, int64_t size_bytes);

  // Sends every later store of this process through this session to a private copy, whatever other threads do. Returns
  // INTERNAL if the kernel refuses; call it again then. Thread-safe.
  absl::Status GiveUpStores();
  // Does the same for all sessions of this process whose epoch has ended. Thread-safe.
  static absl::Status GiveUpStoresOfEnded();
  // The same for sessions of `job` (a name of the daemon and its job) in epochs before `epoch` whose words are told:
  // the event that ends them may still be on its way. Thread-safe.
  static absl::Status GiveUpStoresBefore(const std::string& job, uint64_t epoch);

  // What streams of a GPU may still name when the session goes.
  struct NamedByStreams {
    MappedSlab session, daemon;
    DeviceSlabs device;
  };
  NamedByStreams ReleaseNamedByStreams();

 private:
  void LayOut(const v1::AttachRankResponse& attach, const ShardPlan& plan);
  absl::Status MapOnHost(std::vector<UniqueFd>& fds, const ShardPlan& plan);
  void EnlistStores();

  const uint64_t epoch_;
  const int rank_;
  // Constant after MapSlabs.
  std::string job_;  // empty: the words are shared
  UniqueFd doorbell_;
  MappedSlab session_slab_;
  MappedSlab daemon_slab_;
  MappedSlab shards_;
  PrivateView shards_view_;
  MappedSlab parameters_;
  MappedSlab pool_;
  MappedSlab gradients_;
  MappedSlab slots_;  // empty: they are on a device, or in the session's memory
  DeviceSlabs device_;
  struct {
    const char* shards = nullptr;
    const char* parameters = nullptr;
    const char* pool = nullptr;
    char* gradients = nullptr;
    char* gradient_slots = nullptr;
  } bases_;
  SessionMemoryView view_;
  TraceRecord* trace_ring_ = nullptr;
  ReadOnlyDaemonPageView daemon_page_;
  bool trainers_write_ = false;
  int64_t optimizer_bytes_ = 0;
  bool optimizer_writable_ = false;
  // These belong to the caller's thread.
  UniqueFd optimizer_fd_;  // until it is mapped
  // Guarded.
  absl::Mutex stores_mutex_;
  MappedSlab optimizer_;  // changes under stores_mutex_
  bool stores_given_up_ ABSL_GUARDED_BY(stores_mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_SESSION_MEMORY_H_
