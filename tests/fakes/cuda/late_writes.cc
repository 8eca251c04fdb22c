#include "tests/fakes/cuda/late_writes.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "absl/memory/memory.h"

// glibc's clone by its other name: that of <sched.h> is ThreadSanitizer's, which would look for a thread of its own
// there.
extern "C" int __clone(int (*function)(void*), void* stack, int flags, void* argument, ...);

namespace shardd::fake_cuda {
namespace {

constexpr uint64_t kEntries = 1024;
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr int64_t kPollNs = 100'000;

// The process runs on the memory of another, without threads' data of its own but the empty block below: system calls,
// and no function that a sanitizer watches.
#define SHARDD_BARE __attribute__((no_sanitize("address", "thread", "undefined")))

SHARDD_BARE inline uint64_t NowNs() {
  timespec now = {};
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

// Mapped, and zero where nothing is said.
struct LateWrites::Shared {
  struct Entry {
    uint64_t* word;
    uint64_t value;
    uint64_t due_ns;
  };
  Entry entries[kEntries];
  uint64_t handed;  // entries [landed, handed) are on their way, each at its number modulo kEntries
  uint64_t landed;
  int ended;  // by ~LateWrites
  int process;
  pid_t parent;
  char hold_file[256], held_file[264];
  // errno and the like, on either side of its middle. A failing system call stores errno below it, by what the static
  // thread data of all libraries come to: libtsan alone has 768 KiB.
  alignas(64) char thread_data[size_t{2} << 20];
  alignas(64) char stack[kStackBytes];
};

SHARDD_BARE int LateWrites::Run(void* argument) {
  auto* const shared = static_cast<Shared*>(argument);
  syscall(SYS_close_range, 0u, ~0u, 0u);
  syscall(SYS_setsid);  // what is sent to the group of the process that is to be killed does not reach this one
  syscall(SYS_prctl, PR_SET_NAME, "fake-gpu", 0, 0, 0);
  bool told = false;
  while (true) {
    const uint64_t handed = __atomic_load_n(&shared->handed, __ATOMIC_ACQUIRE);
    const uint64_t landed = shared->landed;
    timespec pause = {0, kPollNs};
    if (landed == handed) {
      if (__atomic_load_n(&shared->ended, __ATOMIC_ACQUIRE) != 0 || syscall(SYS_getppid) != shared->parent) break;
    } else {
      const Shared::Entry& entry = shared->entries[landed % kEntries];
      const bool held = shared->hold_file[0] != '\0' && syscall(SYS_faccessat, AT_FDCWD, shared->hold_file, F_OK) == 0;
      if (held && !told) {
        const auto file = syscall(SYS_openat, AT_FDCWD, shared->held_file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        syscall(SYS_close, file);
        told = true;
      }
      if (!held && NowNs() >= entry.due_ns) {
        __atomic_store_n(entry.word, entry.value, __ATOMIC_SEQ_CST);
        __atomic_store_n(&shared->landed, landed + 1, __ATOMIC_RELEASE);
        continue;
      }
    }
    syscall(SYS_nanosleep, &pause, nullptr);
  }
  syscall(SYS_exit, 0);
  return 0;
}

std::unique_ptr<LateWrites> LateWrites::Start(const Options& options) {
  auto late = absl::WrapUnique(new LateWrites(options.delay_us));
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  late->shared_ = static_cast<Shared*>(memory);
  Shared& shared = *late->shared_;
  if (options.hold_file.size() >= sizeof(shared.hold_file)) return nullptr;
  std::copy(options.hold_file.begin(), options.hold_file.end(), shared.hold_file);
  const std::string held_file = options.hold_file + ".held";
  std::copy(held_file.begin(), held_file.end(), shared.held_file);
  shared.parent = getpid();
  char* const thread_pointer = shared.thread_data + sizeof(shared.thread_data) / 2;
  *reinterpret_cast<void**>(thread_pointer) = thread_pointer;  // as x86-64 wants it
  // No signal may run a handler there.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // No signal for its end either: this process' waits do not see it.
  shared.process = __clone(&LateWrites::Run, shared.stack + kStackBytes, CLONE_VM | CLONE_SETTLS, &shared, nullptr,
                           thread_pointer, nullptr);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return shared.process > 0 ? std::move(late) : nullptr;
}

LateWrites::~LateWrites() {
  if (shared_ == nullptr) return;
  if (shared_->process > 0 && shared_->parent == getpid()) {
    __atomic_store_n(&shared_->ended, 1, __ATOMIC_RELEASE);
    syscall(SYS_wait4, shared_->process, nullptr, __WCLONE, nullptr);
  }
  munmap(shared_, sizeof(Shared));
}

uint64_t LateWrites::Hand(uint64_t* word, uint64_t value) {
  std::lock_guard lock(mutex_);
  const uint64_t number = shared_->handed;
  while (number - __atomic_load_n(&shared_->landed, __ATOMIC_ACQUIRE) >= kEntries) std::this_thread::yield();
  shared_->entries[number % kEntries] = {word, value, NowNs() + delay_ns_};
  __atomic_store_n(&shared_->handed, number + 1, __ATOMIC_RELEASE);
  return number;
}

bool LateWrites::Landed(uint64_t number) const { return __atomic_load_n(&shared_->landed, __ATOMIC_ACQUIRE) > number; }

}  // namespace shardd::fake_cuda
