#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_NODE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_NODE_H_

// A node's NcclExchange in a process of its own, told what to do over a socket; what it says to other nodes goes over
// that, too, and is passed on by the test, which so is the network.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/shm/unique_fd.h"
#include "server/collective/nccl/nccl_library.h"
#include "tests/server/device/device_world.h"
#include "tests/testing/process.h"

namespace shardd {

struct NodePacket {
  enum class Kind : int {
    kBegin,    // to a node: generation
    kSum,      // to a node: generation, sequence
    kMessage,  // node, to or from; bytes: PeerMessage.Exchange
    kDone,     // of a node: generation, sequence, code, wrong; bytes: a digest, or what went wrong
  };
  struct Fixed {
    Kind kind;
    uint64_t generation, sequence;
    int node, code;
    int64_t wrong;
  };
  Fixed fixed = {};
  std::string bytes;
  bool Send(int fd) const;                           // false: nobody is there
  static std::optional<NodePacket> Receive(int fd);  // blocks; nullopt: likewise
};

// Whether NcclNodes has started this process: then main is to run one, on the devices of `world`, one for each rank,
// and to return its result.
bool IsNcclNode(int argc, char** argv);
int RunNcclNode(char** argv, CudaWorld& world, const NcclLibrary& library);

// Of the test. Calls come from one thread; what nodes say is passed on while something is awaited.
class NcclNodes {
 public:
  struct Done {
    int code = 0;
    int64_t wrong = 0;  // elements that are not the sum
    std::string bytes;
  };
  // `hosts[n]`: NCCL_HOSTID of node n.
  explicit NcclNodes(std::vector<std::string> hosts);
  int size() const { return static_cast<int>(hosts_.size()); }
  void Start(int node);
  void Kill(int node);  // and waits for its end
  void Begin(int node, uint64_t generation);
  // And beside every eighth a move; done are both, and what a move has brought wrongly counts as one.
  void Sum(int node, uint64_t generation, uint64_t sequence);
  // Nullopt: not within the limit.
  std::optional<Done> Await(int node, uint64_t generation, uint64_t sequence, absl::Duration limit = testing::kLimit);
  bool IsDone(int node, uint64_t generation, uint64_t sequence);
  void PassOn(absl::Duration how_long);
  // From now on what is said to the node gets lost.
  void Lose(int node, bool lose) { nodes_[static_cast<size_t>(node)].is_lost = lose; }
  std::vector<pid_t> pids() const { return pids_; }  // of all that ever were

 private:
  struct Node {
    std::unique_ptr<testing::Child> child;
    UniqueFd fd;
    bool is_lost = false;
  };
  void PassOnce(absl::Duration limit);

  const std::vector<std::string> hosts_;
  std::vector<Node> nodes_;
  std::vector<pid_t> pids_;
  std::map<std::tuple<int, uint64_t, uint64_t>, Done> done_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_NODE_H_
