#include "server/service/call_secret.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/secret/job_secret.h"

namespace shardd {

absl::StatusOr<JobSecret> SecretOf(const grpc::CallbackServerContext& context) {
  const auto [first, last] = context.client_metadata().equal_range(kJobSecretMetadata);
  if (first == last) {
    return JobSecret();
  }
  if (std::next(first) != last) {
    return absl::InvalidArgumentError(absl::StrCat(
        "job secret: there are several in the call's metadata (want at most one \"", kJobSecretMetadata, "\")"));
  }
  return JobSecret::Create({first->second.data(), first->second.size()});
}

}  // namespace shardd
