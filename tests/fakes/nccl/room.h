#ifndef SHARDD_TESTS_FAKES_NCCL_ROOM_H_
#define SHARDD_TESTS_FAKES_NCCL_ROOM_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

#include "tests/fakes/nccl/shared_clique.h"

namespace shardd::nccl {

// A GPU's room for kernels that wait for other processes' (FAKE_NCCL_ROOM): who finds none waits until one has ended,
// or its own communicator is aborted.
class Room {
 public:
  Room(uint64_t gpu, const SharedMember& of) : gpu_(gpu) {
    const char* const told = std::getenv("FAKE_NCCL_ROOM");
    const int room = told == nullptr ? 0 : std::atoi(told);
    Taken& taken = OfAll();
    std::unique_lock lock(taken.mutex);
    while (room > 0 && taken.by_gpu[gpu_] >= room && !of.has_left()) {
      taken.changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    ++taken.by_gpu[gpu_];
  }
  ~Room() {
    Taken& taken = OfAll();
    const std::lock_guard lock(taken.mutex);
    --taken.by_gpu[gpu_];
    taken.changed.notify_all();
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

 private:
  struct Taken {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<uint64_t, int> by_gpu;
  };
  static Taken& OfAll() {
    static auto* const taken = new Taken();
    return *taken;
  }
  const uint64_t gpu_;
};

}  // namespace shardd::nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_ROOM_H_
