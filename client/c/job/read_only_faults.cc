#include "client/c/job/read_only_faults.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

int ReadOnlyTexts::AddKind(Kind kind) {
  kinds_.push_back(std::move(kind));
  return static_cast<int>(kinds_.size()) - 1;
}

void ReadOnlyTexts::Add(const char* begin, int64_t size_bytes, int kind, std::string_view name) {
  pieces_.push_back(
      {begin, begin + size_bytes, static_cast<uint32_t>(names_.size()), static_cast<uint32_t>(name.size()), kind});
  names_.append(name);
}

void ReadOnlyTexts::Sort() {
  std::sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
}

std::array<std::string_view, 3> ReadOnlyTexts::Find(const char* address) const {
  const auto at = std::upper_bound(pieces_.begin(), pieces_.end(), address,
                                   [](const char* wanted, const Piece& piece) { return wanted < piece.end; });
  if (at == pieces_.end() || address < at->begin) {
    return {};
  }
  const Kind& kind = kinds_[static_cast<size_t>(at->kind)];
  return {std::string_view(kind.before), std::string_view(names_.data() + at->name_at, at->name_size),
          std::string_view(kind.after)};
}

namespace {

void OnFault(int signal, siginfo_t* info, void* context);

std::atomic<const ReadOnlyTexts*> watched[ReadOnlyFaults::kMaxJobs];
std::atomic<int> readers{0};  // handlers that look at what is watched
std::mutex watched_mutex;     // writers

// The handler that was there before ours. Handlers of other threads read it while ours is installed again: what is
// published stays as it is until kPrevious other ones have come, and each of those needs a program that installs one.
constexpr int kPrevious = 64;
struct sigaction previous_slots[kPrevious];
std::atomic<const struct sigaction*> previous{&previous_slots[0]};
int previous_count = 0;  // guarded by watched_mutex

// Faults of this thread that are with `previous`, which has not returned. No call to allocate it is made in a handler.
__thread int passed_on __attribute__((tls_model("initial-exec"))) = 0;

// A fault that `previous` returned from and that came back: where and at which address.
std::atomic<uint64_t> returned_hash = 0;
std::atomic<int> returned_times = 0;
constexpr int kReturnsOfOneFault =
    1000;  // 10 ms or so; a handler that mends faults of its own is seldom asked so often

// Nothing catches what comes next: the access is tried again, or the signal is raised again.
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
// found: this handler), the signal ends the process, as it would without us. So it does where that returns from a store
// into what is `ours`, which nobody can mend.
void PassOn(int signal, siginfo_t* info, void* context, bool ours) {
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
  if (ours || ComesBackForEver(info, context)) {
    EndByDefault(signal, info);
  }
}

// A handler that was installed after ours took a fault for the program's end, put ours back and raised the signal anew
// in its thread (faulthandler). What it was about comes again when both have returned.
bool IsRaisedByALaterHandler(const siginfo_t* info) {
  return info->si_code == SI_TKILL && info->si_pid == getpid() && passed_on == 0;
}

// Writes the line about a store at `address`. False: it is not into what is watched.
bool Say(const char* address) {
  bool said = false;
  readers.fetch_add(1);
  for (const std::atomic<const ReadOnlyTexts*>& slot : watched) {
    const ReadOnlyTexts* const texts = slot.load();
    if (said || texts == nullptr) {
      continue;
    }
    const std::array<std::string_view, 3> parts = texts->Find(address);
    said = !parts[0].empty();
    if (said) {
      struct iovec line[3];
      for (size_t i = 0; i < parts.size(); ++i) {
        line[i] = {const_cast<char*>(parts[i].data()), parts[i].size()};
      }
      (void)!writev(STDERR_FILENO, line, 3);
    }
  }
  readers.fetch_sub(1);
  return said;
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool ours = info->si_code == SEGV_ACCERR && Say(static_cast<const char*>(info->si_addr));
  if (!IsRaisedByALaterHandler(info)) {
    PassOn(signal, info, context, ours);
  }
  errno = saved_errno;
}

// REQUIRES: watched_mutex is held.
void PublishPrevious(const struct sigaction& action) {
  struct sigaction& slot = previous_slots[++previous_count % kPrevious];
  slot = action;
  previous.store(&slot, std::memory_order_release);
}

// REQUIRES: watched_mutex is held. Installs the handler above whichever is there, where ours is not the last.
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

absl::Status ReadOnlyFaults::Watch(const ReadOnlyTexts* texts) {
  std::lock_guard<std::mutex> lock(watched_mutex);
  SHARDD_RETURN_IF_ERROR(Install());
  for (std::atomic<const ReadOnlyTexts*>& slot : watched) {
    if (slot.load() == nullptr) {
      slot.store(texts);
      return absl::OkStatus();
    }
  }
  return absl::ResourceExhaustedError(absl::StrCat("watch writes: too many jobs in this process (got ", kMaxJobs + 1,
                                                   ", want at most ", kMaxJobs, ")"));
}

bool ReadOnlyFaults::Forget(const ReadOnlyTexts* texts) {
  {
    std::lock_guard<std::mutex> lock(watched_mutex);
    for (std::atomic<const ReadOnlyTexts*>& slot : watched) {
      if (slot.load() == texts) {
        slot.store(nullptr);
      }
    }
  }
  const auto now = [] {
    struct timespec time = {};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  };
  for (const int64_t end = now() + 1'000'000'000; readers.load() != 0;) {
    if (now() >= end) {
      return false;
    }
    sched_yield();
  }
  return true;
}

}  // namespace shardd
