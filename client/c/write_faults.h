#ifndef SHARDD_CLIENT_C_WRITE_FAULTS_H_
#define SHARDD_CLIENT_C_WRITE_FAULTS_H_

// Which job a store into protected memory belongs to. One SIGSEGV handler for the process; what is not ours goes on to
// the handler that was there before.

#include <cstdint>

#include "absl/status/status.h"

namespace shardd {

class ClientJob;

class WriteFaults {
 public:
  static constexpr int kMaxJobs = 16;
  static constexpr int kRanges = 3;  // of a job: its shards, its optimizer state, cast parameters
  // Stores into [begin, begin + size_bytes) are `job`'s from now on. RESOURCE_EXHAUSTED: more than kMaxJobs. Replaces
  // what the job had as its range `which` before. Thread-safe, as Forget.
  static absl::Status Watch(ClientJob* job, int which, const void* begin, int64_t size_bytes);
  static void Forget(ClientJob* job);
  // Installs the handler again where another has taken its place since. One system call where none has. Thread-safe.
  static absl::Status Renew();
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_WRITE_FAULTS_H_
