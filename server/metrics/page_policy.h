#ifndef SHARDD_SERVER_METRICS_PAGE_POLICY_H_
#define SHARDD_SERVER_METRICS_PAGE_POLICY_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Whose jobs the status page shows (--status_page).
enum class PagePolicy {
  kOff,  // there is no page
  kOwn,  // those of the user whose browser asks
  kAll,  // all, to whoever reaches the port
};
// How a browser reaches the page.
enum class PageReach {
  kLoopback,  // from this machine alone
  kOthers,    // from other machines, too
  kFront,     // by a Front: every connection is this process's own, so the kernel cannot say whose it is
};
// "off", "own" or "all". INVALID_ARGUMENT: none of them.
absl::StatusOr<PagePolicy> ParsePagePolicy(absl::string_view flag, absl::string_view text);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_PAGE_POLICY_H_
