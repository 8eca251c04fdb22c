#ifndef SHARDD_COMMON_PROCESS_ENVIRONMENT_H_
#define SHARDD_COMMON_PROCESS_ENVIRONMENT_H_

// The only reader of environment variables in C++ (the examples, which are programs of users, read their own).

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Returns the variable's text; empty if it is not set. Threads may share it as long as none sets a variable.
std::string Environment(const char* name);

// Returns the variable's number; -1 if it is not set or empty. INVALID_ARGUMENT: it is no number, or less than
// `smallest`.
absl::StatusOr<int> EnvironmentNumber(const char* name, int smallest);

// "NAME=text" of every variable whose name begins so, in the order of names, with spaces between.
std::string EnvironmentOf(absl::string_view prefix);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_ENVIRONMENT_H_
