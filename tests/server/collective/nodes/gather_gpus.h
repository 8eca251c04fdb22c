#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_GPUS_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_GPUS_H_

#include <memory>
#include <memory_resource>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/nccl/nccl_gather.h"
#include "server/peer/peer_links.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/nccl/await_ends.h"
#include "tests/server/device/fake_cuda_world.h"

namespace shardd::testing {

// Fake GPUs, two of each node, and what nodes gather with by the fake NCCL.
class GatherGpus {
 public:
  explicit GatherGpus(int nodes)
      : gpus_(/*delay_seed=*/7, 2 * nodes, /*queue_limit=*/1024),
        memory_(std::make_unique<RegisteredMemory>(gpus_.driver(), size_t{4} << 30)),
        pool_({.max_blocks_per_chunk = 1, .largest_required_pool_block = size_t{8} << 20}, memory_->resource()),
        devices_(gpus_.MakeAll()),
        exchanges_(static_cast<size_t>(nodes)) {}
  ~GatherGpus() {
    exchanges_.clear();
    devices_.clear();
    pool_.release();
    memory_.reset();
    AwaitEnds(gpus_.machine());
  }
  std::pmr::memory_resource* memory() { return &pool_; }

  std::unique_ptr<NodeGather> Make(std::shared_ptr<const ShardPlan> plan, int node, PeerLinks* links,
                                   const char* shards) {
    NcclExchange::Options options;
    options.node = node;
    options.nodes = plan->nodes();
    options.row_nodes = NodesOfRow(*plan);
    options.moves = true;
    NcclGather::Options gather;
    for (int rank = 0; rank < plan->world_size; ++rank) {
      options.ordinals.push_back(2 * node + rank);
      options.devices.push_back(devices_[static_cast<size_t>(2 * node + rank)].get());
      gather.staging.push_back(
          static_cast<char*>(pool_.allocate(static_cast<size_t>(plan->memory.gather_staging.stride_bytes), 64)));
      options.greetings.push_back(NcclGather::GreetingOf(*plan, gather.staging.back()));
    }
    gather.devices = options.devices;
    options.send = [links](int to, v1::PeerMessage message) { links->Send(to, std::move(message)); };
    auto exchange =
        std::make_shared<NcclExchange>(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), std::move(options));
    {
      absl::MutexLock lock(&mutex_);
      exchanges_[static_cast<size_t>(node)] = exchange;
    }
    gather.node = node;
    gather.plan = std::move(plan);
    gather.links = links;
    gather.exchange = std::move(exchange);
    gather.source = shards;
    return std::make_unique<NcclGather>(std::move(gather));
  }
  // The node's gather is gone, and its links go.
  void Stopped(int node) {
    std::shared_ptr<NcclExchange> gone;
    absl::MutexLock lock(&mutex_);
    gone.swap(exchanges_[static_cast<size_t>(node)]);
  }
  void OnMessage(int to, int from, const v1::PeerMessage::Exchange& message) {
    std::shared_ptr<NcclExchange> exchange;
    {
      absl::MutexLock lock(&mutex_);
      exchange = exchanges_[static_cast<size_t>(to)];
    }
    if (exchange != nullptr) exchange->OnMessage(from, message);
  }

 private:
  FakeCudaWorld gpus_;
  std::unique_ptr<RegisteredMemory> memory_;
  std::pmr::synchronized_pool_resource pool_;  // of memory_
  std::vector<std::unique_ptr<Device>> devices_;
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<NcclExchange>> exchanges_;  // by node
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_GATHER_GPUS_H_
