#ifndef SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_
#define SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_

// Which job a store into protected memory belongs to. One SIGSEGV handler for the process; what is not ours goes on to
// the handler that was there before.

#include <cstdint>

#include "absl/status/status.h"

namespace shardd {

// What a job does about a store into its protected memory.
class StoreFaultHandler {
 public:
  // The store at `address` has faulted. Whether it may be tried again. Async-signal-safe but for what an error costs;
  // one thread at a time.
  virtual bool OnStoreFault(const void* address) = 0;

 protected:
  ~StoreFaultHandler() = default;
};

class WriteFaults {
 public:
  static constexpr int kMaxJobs = 16;
  static constexpr int kRanges = 3;  // of a job: its shards, its optimizer state, cast parameters
  // Stores into [begin, begin + size_bytes) are `job`'s from now on. RESOURCE_EXHAUSTED: more than kMaxJobs. Replaces
  // what the job had as its range `which` before. Thread-safe, as Forget.
  static absl::Status Watch(StoreFaultHandler* job, int which, const void* begin, int64_t size_bytes);
  static void Forget(const StoreFaultHandler* job);
  // Installs the handler again where another has taken its place since. One system call where none has. Thread-safe.
  static absl::Status Renew();
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_
