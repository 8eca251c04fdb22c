#ifndef SHARDD_CLIENT_C_HOST_PROCESS_H_
#define SHARDD_CLIENT_C_HOST_PROCESS_H_

// What the library does once for the process it lives in, which belongs to somebody else: it must not hang at exit,
// must not be used in a forked child and must not disappear while its threads run.

#include <string>

#include "absl/status/status.h"

namespace shardd {

// Pins the library in memory, holds gRPC initialised for good (its shutdown can block an exit for 10 s), prepares fork
// detection and the exit handler. Thread-safe, idempotent; called before anything else uses gRPC.
void InitProcess();

// Whether this is a forked child of the process that called InitProcess. A load, no system call. Thread-safe.
bool IsForkedChild();

// OK, or FAILED_PRECONDITION naming `call` in a forked child.
absl::Status CheckNotForked(const char* call);

// Folder of the file that this code was loaded from, symbolic links resolved; "" when unknown.
std::string LibraryDir();

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_HOST_PROCESS_H_
