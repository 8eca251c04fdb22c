#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_EXCHANGE_FIXTURE_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_EXCHANGE_FIXTURE_H_

// Several nodes' exchanges by NCCL in one process: the daemons' GPUs are others of one fake machine, what they say to
// each other is handed over in order, or held.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/nccl/fake_nccl_world.h"
#include "tests/server/collective/nodes/node_values.h"
#include "tests/server/device/wrapped_device.h"

namespace shardd {

class NcclExchangeTest : public ::testing::Test {
 protected:
  static constexpr absl::Duration kLimit = absl::Seconds(60);
  static constexpr int kGpus = 6;
  struct Pending {
    absl::Notification done;
    absl::Status status;
    std::vector<float*> data;  // by rank
  };
  struct Daemon {
    std::vector<std::unique_ptr<WrappedDevice>> devices;  // by rank, or one for all
    std::unique_ptr<NcclExchange> exchange;
    nccl::Table table = fake_nccl::Table();
  };

  // Node n has the GPUs from n * gpus on.
  void Start(int nodes, int ranks, int gpus_of_each = -1) {
    ranks_ = ranks;
    each_ = gpus_of_each < 0 ? ranks : gpus_of_each;
    devices_ = gpus_.MakeAll();
    daemons_.resize(static_cast<size_t>(nodes));
    held_.resize(static_cast<size_t>(nodes));
    for (int node = 0; node < nodes; ++node) {
      for (int i = 0; i < each_; ++i) {
        daemon(node).devices.push_back(
            std::make_unique<WrappedDevice>(devices_[static_cast<size_t>(node * each_ + i)].get()));
      }
      Make(node);
    }
  }
  void Make(int node) {
    NcclExchange::Options options;
    options.node = node;
    options.nodes = nodes();
    options.row_nodes = row_nodes_;
    options.communicators.limit = limit_;
    options.moves = moves_;
    for (int rank = 0; rank < ranks_; ++rank) {
      options.devices.push_back(daemon(node).devices[static_cast<size_t>(rank % each_)].get());
      options.ordinals.push_back(node * each_ + rank % each_);
      options.greetings.push_back(
          static_cast<char*>(gpus_.memory()->allocate(static_cast<size_t>(NcclExchange::GreetingBytes(nodes())), 64)));
    }
    options.send = [this, node](int to, v1::PeerMessage message) { Deliver(node, to, message); };
    auto made =
        std::make_unique<NcclExchange>(NcclLibrary(daemon(node).table, 22809), gpus_.driver(), std::move(options));
    absl::MutexLock lock(&mutex_);
    daemon(node).exchange = std::move(made);
  }
  // As of a daemon that ends.
  void End(int node) {
    std::unique_ptr<NcclExchange> ended;
    {
      absl::MutexLock swapping(&mutex_);
      ended.swap(daemon(node).exchange);
    }
    ended.reset();
  }
  void TearDown() override {
    for (int node = 0; node < nodes(); ++node) End(node);
    daemons_.clear();
    devices_.clear();
    AwaitEnds(gpus_.machine());
  }
  void Deliver(int from, int to, const v1::PeerMessage& message) {
    absl::MutexLock lock(&mutex_);
    if (hold_ && (from == 0 || !only_of_0_)) {
      held_[static_cast<size_t>(to)].emplace_back(from, message);
    } else if (const auto& exchange = daemon(to).exchange; exchange != nullptr) {
      exchange->OnMessage(from, message.exchange());
    }
  }
  void Hold(bool hold, bool only_of_0 = false) {
    absl::MutexLock lock(&mutex_);
    hold_ = hold;
    only_of_0_ = only_of_0;
    for (int to = 0; !hold && to < nodes(); ++to) {
      for (const auto& [from, message] : held_[static_cast<size_t>(to)]) {
        if (daemon(to).exchange != nullptr) daemon(to).exchange->OnMessage(from, message.exchange());
      }
      held_[static_cast<size_t>(to)].clear();
    }
  }
  void AwaitHeld(int to, int count) {
    const auto held = [&] {
      absl::MutexLock lock(&mutex_);
      return static_cast<int>(held_[static_cast<size_t>(to)].size());
    };
    for (int i = 0; i < 10000 && held() < count; ++i) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(held(), count);
  }
  void BeginOnAll(uint64_t generation) {
    for (int node = 0; node < nodes(); ++node) daemon(node).exchange->Begin(generation);
  }

  // Of every rank two parts of Numel(sequence) elements together.
  static int64_t Numel(uint64_t sequence) { return 5 + static_cast<int64_t>(sequence % 7) * 9001; }
  std::shared_ptr<Pending> Sum(int node, uint64_t generation, uint64_t sequence) {
    auto pending = std::make_shared<Pending>();
    const int64_t numel = Numel(sequence);
    std::vector<NodePart> parts;
    for (int rank = 0; rank < ranks_; ++rank) {
      auto* const data = static_cast<float*>(gpus_.memory()->allocate(static_cast<size_t>(numel + 16) * 4, 64));
      FillNodeValues(node, rank, sequence, data, numel);
      pending->data.push_back(data);
      parts.push_back({rank, data, 3});
      parts.push_back({rank, data + 3, numel - 3});
    }
    daemon(node).exchange->AllReduce(generation, sequence, std::move(parts), absl::StrCat("sum ", sequence),
                                     [pending](absl::Status status) {
                                       EXPECT_FALSE(pending->done.HasBeenNotified());
                                       pending->status = std::move(status);
                                       pending->done.Notify();
                                     });
    return pending;
  }
  // Every rank sends its other nodes' ranks a byte that names it, and gets theirs.
  std::shared_ptr<Pending> Move(int node, uint64_t generation, uint64_t sequence) {
    auto pending = std::make_shared<Pending>();
    std::vector<NodeMove> moves;
    for (int rank = 0; rank < ranks_; ++rank) {
      auto* const bytes = static_cast<char*>(gpus_.memory()->allocate(64 * static_cast<size_t>(nodes()), 64));
      pending->data.push_back(reinterpret_cast<float*>(bytes));
      bytes[64 * node] = static_cast<char>(10 * node + rank);
      for (int other = 0; other < nodes(); ++other) {
        if (other == node) continue;
        moves.push_back({rank, {other, bytes + 64 * node, nullptr, 1}});
        moves.push_back({rank, {other, nullptr, bytes + 64 * other, 1}});
      }
    }
    daemon(node).exchange->Move(generation, sequence, std::move(moves), absl::StrCat("move ", sequence),
                                [pending](absl::Status status) {
                                  pending->status = std::move(status);
                                  pending->done.Notify();
                                });
    return pending;
  }
  void ExpectMoves(const std::vector<std::shared_ptr<Pending>>& all) {
    for (const auto& pending : all) {
      ASSERT_TRUE(Await(pending).ok()) << pending->status;
      for (int rank = 0; rank < ranks_; ++rank) {
        const char* const bytes = reinterpret_cast<const char*>(pending->data[static_cast<size_t>(rank)]);
        for (int node = 0; node < nodes(); ++node) EXPECT_EQ(bytes[64 * node], 10 * node + rank);
      }
    }
  }
  static absl::Status Await(const std::shared_ptr<Pending>& pending) {
    EXPECT_TRUE(pending->done.WaitForNotificationWithTimeout(kLimit)) << "it does not end";
    return pending->status;
  }
  std::vector<std::shared_ptr<Pending>> SumOnAll(uint64_t generation, uint64_t sequence) {
    std::vector<std::shared_ptr<Pending>> all;
    for (int node = 0; node < nodes(); ++node) all.push_back(Sum(node, generation, sequence));
    return all;
  }
  void ExpectSums(const std::vector<std::shared_ptr<Pending>>& all, uint64_t sequence) {
    const int64_t numel = Numel(sequence);
    for (const auto& pending : all) ASSERT_TRUE(Await(pending).ok()) << sequence << ": " << pending->status;
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto r = static_cast<size_t>(rank);
      EXPECT_EQ(WrongNodeSums(nodes(), rank, sequence, all[0]->data[r], numel), 0);
      for (const auto& pending : all) {
        EXPECT_EQ(std::memcmp(pending->data[r], all[0]->data[r], static_cast<size_t>(numel) * 4), 0) << "other bits";
      }
    }
  }
  void ExpectSums(uint64_t generation, uint64_t sequence) { ExpectSums(SumOnAll(generation, sequence), sequence); }
  void AwaitStatus(int node, const std::string& part) {
    for (int i = 0; i < 10000 && daemon(node).exchange->Describe().find(part) == std::string::npos; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_THAT(daemon(node).exchange->Describe(), ::testing::HasSubstr(part));
  }
  // Every device of the node's has it.
  void AwaitIssued(int node, const std::string& label) {
    for (const auto& device : daemon(node).devices) {
      const auto issued = [&] {
        const auto records = device->records();
        return std::any_of(records.begin(), records.end(), [&](const auto& record) { return record.label == label; });
      };
      for (int i = 0; i < 10000 && !issued(); ++i) absl::SleepFor(absl::Milliseconds(1));
      ASSERT_TRUE(issued()) << "node " << node << ", " << label;
    }
  }
  Daemon& daemon(int node) { return daemons_[static_cast<size_t>(node)]; }
  int nodes() const { return static_cast<int>(daemons_.size()); }

  FakeCudaWorld gpus_{/*delay_seed=*/7, kGpus, /*queue_limit=*/1024};
  absl::Duration limit_ = absl::Seconds(30);
  bool moves_ = false;
  int ranks_ = 0, each_ = 0, row_nodes_ = 0;
  std::vector<std::unique_ptr<Device>> devices_;
  absl::Mutex mutex_;  // exchanges come and go under it
  std::vector<Daemon> daemons_;
  bool hold_ = false, only_of_0_ = false;
  std::vector<std::vector<std::pair<int, v1::PeerMessage>>> held_;  // by receiver
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NCCL_NCCL_EXCHANGE_FIXTURE_H_
