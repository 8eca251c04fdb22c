#ifndef SHARDD_TESTS_FAKES_NCCL_CLIQUE_H_
#define SHARDD_TESTS_FAKES_NCCL_CLIQUE_H_

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/cuda/driver_api.h"
#include "tests/fakes/nccl/call.h"
#include "tests/fakes/nccl/windows.h"

namespace shardd::nccl {

// The members' calls between two ends of groups: on the GPU one kernel each, which waits for the others'.
struct Launch {
  std::vector<std::vector<Call>> by_rank;
  int arrived = 0;
  bool done = false;
};

// Members that are all of this process.
struct Clique {
  explicit Clique(int size) : ranks(size), windows(size) {}
  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::map<CUcontext, int> members;  // the rank by the GPU
  bool aborted = false;
  bool mismatched = false;
  std::map<uint64_t, std::shared_ptr<Launch>> launches;  // by number
  Windows windows;

  // On a member's stream. Every member has to come; the last adds.
  void Run(uint64_t number, int rank, std::vector<Call> calls) {
    std::unique_lock lock(mutex);
    std::shared_ptr<Launch>& entry = launches[number];
    if (entry == nullptr) {
      entry = std::make_shared<Launch>();
      entry->by_rank.resize(static_cast<size_t>(ranks));
    }
    const std::shared_ptr<Launch> launch = entry;
    launch->by_rank[static_cast<size_t>(rank)] = std::move(calls);
    if (++launch->arrived == ranks && !aborted) {
      for (const auto& other : launch->by_rank) mismatched = mismatched || other != launch->by_rank[0];
      mismatched = mismatched || !IsSymmetric(*launch);
      if (!mismatched) Add(*launch);
      launch->done = true;
      launches.erase(number);
      changed.notify_all();
    }
    changed.wait(lock, [&] { return launch->done || aborted; });
    for (const Call& call : launch->by_rank[static_cast<size_t>(rank)]) windows.Use(rank, call.send, -1);
  }
  // What the real one reads at wrong addresses: symmetric kernels trust that offsets are equal.
  bool IsSymmetric(const Launch& launch) const {
    for (size_t i = 0; i < launch.by_rank[0].size(); ++i) {
      std::vector<const void*> sends;
      for (const auto& calls : launch.by_rank) sends.push_back(calls[i].send);
      if (launch.by_rank[0][i].scatters && !windows.Fits(sends, launch.by_rank[0][i].count * sizeof(float)))
        return false;
    }
    return true;
  }
  void Add(const Launch& launch) const {
    for (size_t i = 0; i < launch.by_rank[0].size(); ++i) {
      const Call& call = launch.by_rank[0][i];
      std::vector<float> sum(call.count, 0.0f);
      for (size_t offset = 0; offset < call.count; offset += kRingPieceNumel) {
        std::vector<const float*> sends;
        for (const auto& calls : launch.by_rank) sends.push_back(calls[i].send + offset);
        AddPiece(call, offset, sends, &sum[offset]);
      }
      for (int rank = 0; rank < ranks; ++rank) {
        if (!call.all && rank != call.root) continue;
        std::memcpy(launch.by_rank[static_cast<size_t>(rank)][i].receive, sum.data(), call.count * sizeof(float));
      }
    }
  }
};

}  // namespace shardd::nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_CLIQUE_H_
