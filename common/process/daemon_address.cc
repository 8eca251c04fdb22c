#include "common/process/daemon_address.h"

#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/process/environment.h"

namespace shardd {

std::string DaemonAddress(absl::string_view given) {
  return given.empty() ? Environment("SHARDD_ADDRESS") : std::string(given);
}

std::string RuntimeFolder() {
  const std::string runtime = Environment("XDG_RUNTIME_DIR");
  return absl::StartsWith(runtime, "/") ? absl::StrCat(runtime, "/shardd") : "";
}

std::string TemporaryFolder() { return absl::StrCat("/tmp/shardd-", ::geteuid()); }

}  // namespace shardd
