#ifndef SHARDD_COMMON_SECRET_JOB_SECRET_H_
#define SHARDD_COMMON_SECRET_JOB_SECRET_H_

// A job's secret on the side of who gives it. It travels in gRPC metadata and not in a request, so that no message that
// is logged, recorded or shown contains it.

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

inline constexpr char kJobSecretMetadata[] = "shardd-job-secret-bin";
inline constexpr size_t kLeastJobSecretBytes = 16;
inline constexpr size_t kMostJobSecretBytes = 64;

// INVALID_ARGUMENT where the length is out of range; the text does not contain the secret.
absl::Status CheckJobSecret(absl::string_view secret);

// Contents of the file without one newline at its end. PERMISSION_DENIED: the file is neither this user's nor root's,
// or others can read or change it. Its group may read a file of root's, because that is how Kubernetes mounts a secret
// for a container that does not run as root. INVALID_ARGUMENT: not a regular file, or not a secret.
absl::StatusOr<std::string> ReadJobSecretFile(const std::string& path);

// Reads SHARDD_JOB_SECRET, else the contents of the file that SHARDD_JOB_SECRET_FILE names; empty: neither is set.
absl::StatusOr<std::string> ReadJobSecret();

}  // namespace shardd

#endif  // SHARDD_COMMON_SECRET_JOB_SECRET_H_
