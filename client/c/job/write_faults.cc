#include "client/c/job/write_faults.h"

#include <sched.h>
#include <signal.h>
#include <string.h>

#include <atomic>
#include <mutex>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

struct Range {
  std::atomic<StoreFaultHandler*> job{nullptr};
  std::atomic<const char*> begin{nullptr};
  std::atomic<int64_t> size_bytes{0};
  int which = 0;
};
Range ranges[WriteFaults::kMaxJobs * WriteFaults::kRanges];
std::mutex ranges_mutex;                   // writers
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // the handler: threads of one parallel loop fault together
struct sigaction previous;
std::atomic<bool> passed_on = false;  // a fault is with `previous`, which has not returned

// Calls the handler that was there before. One that found this handler when it was installed (faulthandler, enabled
// after a first Watch) puts it back and raises the signal anew: that signal ends the process, as it would without us.
void PassOn(int signal, siginfo_t* info, void* context) {
  const bool raised_by_previous = info->si_code <= 0 && passed_on.load();
  if (!raised_by_previous && (previous.sa_flags & SA_SIGINFO) != 0) {
    passed_on = true;
    previous.sa_sigaction(signal, info, context);
    passed_on = false;
  } else if (!raised_by_previous && previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    passed_on = true;
    previous.sa_handler(signal);
    passed_on = false;
  } else {
    // The store is tried again, or the signal is raised again, and nothing catches it.
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    sigaction(SIGSEGV, &plain, nullptr);
    if (info->si_code <= 0) {
      raise(signal);
    }
  }
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
  PassOn(signal, info, context);
  errno = saved_errno;
}

// REQUIRES: ranges_mutex is held. Installs the handler above whichever is there: programs reset the signal, or set a
// handler of their own that does not call this one for a fault that it takes for the program's end (faulthandler).
absl::Status Install() {
  struct sigaction current = {};
  if (sigaction(SIGSEGV, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) != 0 &&
      current.sa_sigaction == &OnFault) {
    return absl::OkStatus();
  }
  struct sigaction action = {};
  action.sa_sigaction = &OnFault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGSEGV, &action, &previous) != 0) {
    return absl::InternalError(absl::StrCat("watch writes: sigaction: ", strerror(errno)));
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
