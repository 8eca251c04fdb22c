#ifndef SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_
#define SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_

// Finds the job whose protected memory a store has hit. The process has one SIGSEGV handler; faults elsewhere go on to
// the handler that was installed before.

#include <cstdint>

#include "absl/status/status.h"

namespace shardd {

// What a job does about a store into its protected memory.
class StoreFaultHandler {
 public:
  // Returns whether the store at `address`, which has faulted, can be retried. Called by one thread at a time, from a
  // signal handler.
  virtual bool OnStoreFault(const void* address) = 0;

 protected:
  ~StoreFaultHandler() = default;
};

class WriteFaults {
 public:
  static constexpr int kMaxJobs = 16;
  static constexpr int kRanges = 3;  // of a job: its shards, its optimizer state, cast parameters
  // Tells `job` of stores into [begin, begin + size_bytes) from now on; replaces its former range `which`. Returns
  // RESOURCE_EXHAUSTED beyond kMaxJobs. Thread-safe, as is Forget.
  static absl::Status Watch(StoreFaultHandler* job, int which, const void* begin, int64_t size_bytes);
  static void Forget(const StoreFaultHandler* job);
  // Installs the handler again if another has replaced it; costs one system call if none has. Thread-safe.
  static absl::Status Renew();
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_WRITE_FAULTS_H_
