#ifndef SHARDD_TESTS_FAKES_NCCL_SHARED_CLIQUE_H_
#define SHARDD_TESTS_FAKES_NCCL_SHARED_CLIQUE_H_

// Members of several processes, over a file of shared memory that their id names. The file has a name until all have
// joined. A member that is killed leaves the others waiting, as over a network that does not notice; one that is
// aborted or destroyed is noticed by those that wait for it.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/collective/nccl/nccl_api.h"
#include "tests/fakes/nccl/call.h"

namespace shardd::nccl {

// One member of this process. Thread-safe, but for Run: one call at a time.
class SharedMember {
 public:
  // `gpu`: which of the host's. Null: what there is by that name is no such clique, or has that member.
  static std::unique_ptr<SharedMember> Join(const std::string& id, int ranks, int rank, uint64_t gpu);
  SharedMember(const SharedMember&) = delete;
  SharedMember& operator=(const SharedMember&) = delete;
  ~SharedMember();

  // ncclInProgress until all have joined; then ncclInvalidUsage where two are on one GPU of one host, or their calls
  // differ; ncclRemoteError: Run waits for one that has left.
  ncclResult_t State(std::string* why) const;
  // The calls are made: State is ncclInProgress until those that they connect have made theirs, too. `sums_connect`:
  // sums have no connections yet either.
  void Connect(const std::vector<Call>& calls, bool sums_connect);
  // Waits for the same of every other member, or Leave. All add in one order.
  void Run(const std::vector<Call>& calls);
  // Run returns soon, from now on at once.
  void Leave();
  bool has_left() const { return left_; }

 private:
  struct File;
  struct Area;
  struct Channel;
  SharedMember(std::string name, int ranks, int rank) : name_(std::move(name)), ranks_(ranks), rank_(rank) {}
  Area& AreaOf(int rank) const;
  bool AllHaveJoined() const;
  bool IsConnecting(int* gone) const;
  // Until every member's counter is at least `value`. False: left.
  bool AwaitAll(std::atomic<uint64_t> Area::*counter, uint64_t value);
  // All of one group, side by side: one that waits for its other half holds up none but those of its pair.
  void RunMoves(const std::vector<Call>& calls);
  Channel& ChannelOf(int from, int to) const;
  void RunPiece(const std::vector<Call>& calls, size_t index, size_t offset);

  const std::string name_;
  const int ranks_, rank_;
  File* file_ = nullptr;
  size_t file_bytes_ = 0;
  std::atomic<bool> left_ = false;
  std::atomic<int> waits_for_ = -1;  // a member that has left
  uint64_t turn_ = 0;                // pieces that this member has begun
};

}  // namespace shardd::nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_SHARED_CLIQUE_H_
