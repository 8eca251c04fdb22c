#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/shm/page_scan.h"
#include "common/shm/session_view.h"
#include "common/shm/slab_internal.h"
#include "common/shm/unique_fd.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace shardd::shm_internal {

absl::Status ErrnoStatus(int error, absl::string_view operation, absl::string_view object) {
  const std::string text = absl::StrCat(operation, " \"", object, "\": ", strerror(error), " (errno ", error, ")");
  switch (error) {
    case ENOSPC:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case EDQUOT:
      return absl::ResourceExhaustedError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(text);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::StatusOr<void*> MapShared(int fd, int64_t size_bytes, bool writable, absl::string_view object,
                                MappedPages pages) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  const size_t mapped_bytes = static_cast<size_t>(RoundUpToPage(size_bytes));
  // A huge page can only be mapped where address and file offset agree modulo its size, so reserve a little more
  // address space, map over the aligned part, and release the rest.
  size_t slack_bytes = size_bytes >= kHugePageBytes ? static_cast<size_t>(kHugePageBytes) : 0;
  const size_t off_bytes = pages == MappedPages::kSmall && slack_bytes > 0 ? static_cast<size_t>(kPageBytes) : 0;
  slack_bytes += off_bytes;
  void* reserved =
      mmap(nullptr, mapped_bytes + slack_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return ErrnoStatus(errno, "reserve address space for slab", object);
  }
  char* const first = static_cast<char*>(reserved);
  char* base = first;
  if (slack_bytes > 0) {
    const uintptr_t huge = static_cast<uintptr_t>(kHugePageBytes);
    base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first) + huge - 1) / huge * huge) + off_bytes;
  }
  if (mmap(base, mapped_bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, mapped_bytes + slack_bytes);
    return ErrnoStatus(error, writable ? "map read-write slab" : "map read-only slab", object);
  }
  const size_t before_bytes = static_cast<size_t>(base - first);
  if (before_bytes > 0) {
    munmap(first, before_bytes);
  }
  if (slack_bytes > before_bytes) {
    munmap(base + mapped_bytes, slack_bytes - before_bytes);
  }
  return base;
}

absl::Status PopulatePages(void* data, int64_t size_bytes, bool writable, absl::string_view object, PopulateWith with) {
  const size_t mapped_bytes = static_cast<size_t>(RoundUpToPage(size_bytes));
  if (with == PopulateWith::kKernel) {
    int result = 0;
    // In pieces: while the kernel populates, no other thread of the process can map memory, nor fault behind one that
    // wants to.
    for (size_t done = 0; done < mapped_bytes && result == 0;) {
      const size_t piece_bytes = std::min(mapped_bytes - done, static_cast<size_t>(kHugePageBytes));
      result =
          madvise(static_cast<char*>(data) + done, piece_bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
      if (result == 0) {
        done += piece_bytes;
      } else if (errno == EINTR || errno == EAGAIN) {
        result = 0;
      }
    }
    if (result == 0) {
      return absl::OkStatus();
    }
    if (errno == EFAULT || errno == ENOMEM) {  // EFAULT: a touch would have been SIGBUS
      return ErrnoStatus(ENOMEM, "populate slab", object);
    }
    if (errno != EINVAL) {
      return ErrnoStatus(errno, "populate slab", object);
    }
  }
  char* const base = static_cast<char*>(data);
  // Hides zero from the optimiser: `or` with a known zero may become a load, and a load of a hole does not allocate.
  uint32_t zero = 0;
  asm volatile("" : "+r"(zero));
  for (size_t offset = 0; offset < mapped_bytes; offset += static_cast<size_t>(kPageBytes)) {
    auto* word = reinterpret_cast<std::atomic<uint32_t>*>(base + offset);
    if (writable) {
      word->fetch_or(zero, std::memory_order_relaxed);  // a write that keeps what another process wrote
    } else {
      (void)word->load(std::memory_order_relaxed);
    }
  }
  return absl::OkStatus();
}

bool MakeHugePages(void* data, int64_t size_bytes) {
  using Clock = std::chrono::steady_clock;
  // Each call waits for every processor once. One that finds no page of a huge one refuses it.
  constexpr int64_t kCallBytes = 16 * kHugePageBytes;
  constexpr std::chrono::milliseconds kLongCall(100);  // small pages take 30
  constexpr int kMostLongCalls = 2;
  int long_calls = 0;
  char* const base = static_cast<char*>(data);
  const int64_t huge_bytes = size_bytes / kHugePageBytes * kHugePageBytes;
  for (int64_t first = 0; first < huge_bytes; first += kCallBytes) {
    const int64_t end = std::min(first + kCallBytes, huge_bytes);
    for (int64_t at = first; at < end; at += kHugePageBytes) {
      // Where memory is out this is an error, and a touch would be SIGBUS.
      int present = 0;
      do {
        present = madvise(base + at, static_cast<size_t>(kPageBytes), MADV_POPULATE_WRITE);
      } while (present != 0 && (errno == EINTR || errno == EAGAIN));
      if (present != 0) return false;
    }
    const Clock::time_point start = Clock::now();
    int result = 0;
    for (int attempt = 0; attempt < 5; ++attempt) {
      result = madvise(base + first, static_cast<size_t>(end - first), MADV_COLLAPSE);
      if (result == 0 || (errno != EAGAIN && errno != EINTR)) break;  // EAGAIN: a page was in use for a moment
    }
    if (Clock::now() - start > kLongCall) ++long_calls;
    if (result != 0 || (long_calls == kMostLongCalls && end < huge_bytes)) return false;
  }
  return huge_bytes > 0;
}

namespace {

// Where the kernel does not scan page tables. It looks at all mappings of the process before this one, and no other
// thread can map memory meanwhile.
int64_t HugeBytesOfMaps(const void* data) {
  FILE* smaps = std::fopen("/proc/self/smaps", "re");
  if (smaps == nullptr) {
    return 0;
  }
  const auto wanted = reinterpret_cast<unsigned long>(data);
  bool ours = false;
  int64_t huge_bytes = 0;
  char line[512];
  while (std::fgets(line, sizeof(line), smaps) != nullptr) {
    unsigned long begin, end;
    long long kib;
    char key[64];
    if (std::sscanf(line, "%lx-%lx ", &begin, &end) == 2) {
      if (ours) {
        break;
      }
      ours = begin == wanted;
    } else if (ours && std::sscanf(line, "%63[^:]: %lld kB", key, &kib) == 2 &&
               (std::strcmp(key, "ShmemPmdMapped") == 0 || std::strcmp(key, "FilePmdMapped") == 0)) {
      huge_bytes += int64_t{kib} * 1024;
    }
  }
  std::fclose(smaps);
  return huge_bytes;
}

// The word in brackets: "always within_size [advise] never".
std::string ChosenIn(const char* path) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (word.front() == '[') return word;
  }
  return "";
}

// Whether the kernel may give shared memory huge pages at all; by default it does not.
bool HugePagesAreOffered() {
  const std::string of_size = ChosenIn("/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled");
  const std::string of_all = ChosenIn("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const std::string& chosen = of_size.empty() || of_size == "[inherit]" ? of_all : of_size;
  return of_all != "[deny]" && (of_all == "[force]" || chosen != "[never]");
}

}  // namespace

int64_t HugeMappedBytes(const void* data, int64_t size_bytes) {
  if (size_bytes < kHugePageBytes || !HugePagesAreOffered()) {
    return 0;
  }
  const UniqueFd page_map(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  int64_t huge_bytes = 0;
  const absl::Status scanned = ScanPages(page_map.get(), data, 0, size_bytes, {.all_of = kPageHuge},
                                         [&](int64_t first, int64_t end) { huge_bytes += end - first; });
  return scanned.ok() ? huge_bytes : HugeBytesOfMaps(data);
}

}  // namespace shardd::shm_internal
