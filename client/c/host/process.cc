#include "client/c/host/process.h"

#include <dlfcn.h>
#include <grpc/grpc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <climits>

#include "absl/base/call_once.h"
#include "absl/strings/str_cat.h"
#include "client/c/session/client_stream.h"

namespace shardd {
namespace {

// A page that the kernel wipes in every child: 1 in the process that made it, 0 in its forked children, however they
// were forked. nullptr where the kernel has no MADV_WIPEONFORK; then pids are compared.
std::atomic<std::atomic<uint32_t>*> fork_guard{nullptr};
std::atomic<pid_t> owner_pid{0};

void PrepareForkGuard() {
  const long page_bytes = sysconf(_SC_PAGESIZE);
  void* page =
      mmap(nullptr, static_cast<size_t>(page_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return;
  }
  if (madvise(page, static_cast<size_t>(page_bytes), MADV_WIPEONFORK) != 0) {
    munmap(page, static_cast<size_t>(page_bytes));
    return;
  }
  auto* word = new (page) std::atomic<uint32_t>(1);
  fork_guard.store(word, std::memory_order_release);
}

// An object of this library whose address says which file it came from.
void Anchor() {}

void PinLibrary() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&Anchor), &info) != 0 && info.dli_fname != nullptr) {
    // Threads of gRPC run its code until the process ends; a dlclose must not unmap it under them. NOLOAD: this never
    // loads anything, and fails harmlessly in an executable.
    (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

void AtExit() {
  if (!IsForkedChild()) {
    ClientStream::CancelAllAtExit();
  }
}

}  // namespace

void InitProcess() {
  static absl::once_flag once;
  absl::call_once(once, [] {
    owner_pid.store(getpid());
    PinLibrary();
    PrepareForkGuard();
    grpc_init();
    (void)atexit(&AtExit);
  });
}

bool IsForkedChild() {
  if (const std::atomic<uint32_t>* word = fork_guard.load(std::memory_order_acquire); word != nullptr) {
    return word->load(std::memory_order_relaxed) == 0;
  }
  const pid_t owner = owner_pid.load(std::memory_order_relaxed);
  return owner != 0 && owner != getpid();
}

absl::Status CheckNotForked(const char* call) {
  if (!IsForkedChild()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(call, ": the library cannot be used in a forked child (got pid ", getpid(), ", want ",
                   owner_pid.load(), "); use it in the process that attached, or start the child with exec"));
}

std::string LibraryDir() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&Anchor), &info) == 0 || info.dli_fname == nullptr) {
    return "";
  }
  char resolved[PATH_MAX];
  if (realpath(info.dli_fname, resolved) == nullptr) {
    return "";
  }
  const std::string path = resolved;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

}  // namespace shardd
