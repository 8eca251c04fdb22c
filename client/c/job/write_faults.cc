#include "client/c/job/write_faults.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

void OnFault(int signal, siginfo_t* info, void* context);

struct Range {
  std::atomic<StoreFaultHandler*> job{nullptr};
  std::atomic<const char*> begin{nullptr};
  std::atomic<int64_t> size_bytes{0};
  int which = 0;
};
Range ranges[WriteFaults::kMaxJobs * WriteFaults::kRanges];
std::mutex ranges_mutex;                   // writers
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // the handler: threads of one parallel loop fault together

// The handler that was there before ours. Handlers of other threads read it while a pass renews: what is published
// stays as it is until kPrevious other ones have come, and each of those needs a program that installs one anew.
constexpr int kPrevious = 64;
struct sigaction previous_slots[kPrevious];
std::atomic<const struct sigaction*> previous{&previous_slots[0]};
int previous_count = 0;  // guarded by ranges_mutex

// Faults of this thread that are with `previous`, which has not returned. No call to allocate it is made in a handler.
__thread int passed_on __attribute__((tls_model("initial-exec"))) = 0;

// A fault that `previous` returned from and that came back: where and at which address.
std::atomic<uint64_t> returned_hash = 0;
std::atomic<int> returned_times = 0;
constexpr int kReturnsOfOneFault =
    1000;  // 10 ms or so; a handler that mends faults of its own is seldom asked so often

// Nothing catches what comes next: the store is tried again, or the signal is raised again.
void EndByDefault(int signal, const siginfo_t* info) {
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(SIGSEGV, &plain, nullptr);
  if (info->si_code <= 0) {
    raise(signal);
  }
}

bool IsOurs(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &OnFault;
}

// `previous` has returned as if the fault were mended. One that was disabled meanwhile (faulthandler) always does.
bool ComesBackForEver(const siginfo_t* info, const void* context) {
  if (info->si_code <= 0) {
    return false;
  }
  uint64_t hash = reinterpret_cast<uintptr_t>(info->si_addr);
#if defined(__x86_64__)
  hash ^= static_cast<uint64_t>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]) << 16;
#else
  (void)context;
#endif
  if (returned_hash.exchange(hash) != hash) {
    returned_times = 0;
  }
  struct sigaction current = {};
  return ++returned_times >= kReturnsOfOneFault && sigaction(SIGSEGV, nullptr, &current) == 0 && IsOurs(current);
}

// Calls the handler that was there before. Where that raises the signal anew (faulthandler, which puts back what it had
// found: this handler), the signal ends the process, as it would without us.
void PassOn(int signal, siginfo_t* info, void* context) {
  const struct sigaction before = *previous.load(std::memory_order_acquire);
  const bool takes_info = (before.sa_flags & SA_SIGINFO) != 0;
  if (passed_on > 0 || (!takes_info && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))) {
    EndByDefault(signal, info);
    return;
  }
  ++passed_on;
  if (takes_info) {
    before.sa_sigaction(signal, info, context);
  } else {
    before.sa_handler(signal);
  }
  --passed_on;
  if (ComesBackForEver(info, context)) {
    EndByDefault(signal, info);
  }
}

// A handler that was installed after ours took a fault for the program's end, put ours back and raised the signal anew
// in its thread (faulthandler, enabled since the last pass). What it was about comes again when both have returned.
bool IsRaisedByALaterHandler(const siginfo_t* info) {
  return info->si_code == SI_TKILL && info->si_pid == getpid() && passed_on == 0;
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const char* address = static_cast<const char*>(info->si_addr);
  if (info->si_code == SEGV_ACCERR) {
    for (Range& range : ranges) {
      const char* begin = range.begin.load(std::memory_order_acquire);
      StoreFaultHandler* job = range.job.load(std::memory_order_acquire);
      if (job == nullptr || begin == nullptr || address < begin ||
          address >= begin + range.size_bytes.load(std::memory_order_acquire) ||
          range.job.load(std::memory_order_acquire) != job || range.begin.load(std::memory_order_acquire) != begin) {
        continue;  // also of a range that another thread replaces: this store is into one that stays
      }
      while (busy.test_and_set(std::memory_order_acquire)) {
        sched_yield();
      }
      const bool again = job->OnStoreFault(address);
      busy.clear(std::memory_order_release);
      if (again) {
        errno = saved_errno;
        return;
      }
    }
  }
  if (!IsRaisedByALaterHandler(info)) {
    PassOn(signal, info, context);
  }
  errno = saved_errno;
}

// REQUIRES: ranges_mutex is held.
void PublishPrevious(const struct sigaction& action) {
  struct sigaction& slot = previous_slots[++previous_count % kPrevious];
  slot = action;
  previous.store(&slot, std::memory_order_release);
}

// REQUIRES: ranges_mutex is held. Installs the handler above whichever is there: programs reset the signal, or set a
// handler of their own that does not call this one for a fault that it takes for the program's end (faulthandler).
absl::Status Install() {
  struct sigaction current = {};
  if (sigaction(SIGSEGV, nullptr, &current) == 0 && IsOurs(current)) {
    return absl::OkStatus();
  }
  struct sigaction action = {};
  action.sa_sigaction = &OnFault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  PublishPrevious(current);  // before ours is there, which a fault of another thread may reach at once
  struct sigaction replaced = {};
  if (sigaction(SIGSEGV, &action, &replaced) != 0) {
    return absl::InternalError(absl::StrCat("watch writes: sigaction: ", strerror(errno)));
  }
  if (!IsOurs(replaced) && (replaced.sa_sigaction != current.sa_sigaction || replaced.sa_flags != current.sa_flags)) {
    PublishPrevious(replaced);  // another thread's, installed in between
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteFaults::Watch(StoreFaultHandler* job, int which, const void* begin, int64_t size_bytes) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  if (absl::Status status = Install(); !status.ok()) {
    return status;
  }
  Range* free = nullptr;
  for (Range& range : ranges) {
    if (range.job.load() == job && range.which == which) {
      free = &range;
      break;
    }
    if (range.job.load() == nullptr && free == nullptr) {
      free = &range;
    }
  }
  if (free == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("watch writes: too many jobs in this process (got ", kMaxJobs + 1,
                                                     ", want at most ", kMaxJobs,
                                                     "); call shardd_open_window before writing instead"));
  }
  if (free->job.load() == job && free->begin.load() == begin && free->size_bytes.load() == size_bytes) {
    return absl::OkStatus();  // never gone, for a store of another thread
  }
  free->begin.store(nullptr);
  free->size_bytes.store(size_bytes);
  free->which = which;
  free->job.store(job);
  free->begin.store(static_cast<const char*>(begin), std::memory_order_release);
  return absl::OkStatus();
}

absl::Status WriteFaults::Renew() {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  return Install();
}

void WriteFaults::Forget(const StoreFaultHandler* job) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  for (Range& range : ranges) {
    if (range.job.load() == job) {
      range.begin.store(nullptr);
      range.job.store(nullptr);
    }
  }
}

}  // namespace shardd
