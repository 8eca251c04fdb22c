#include "server/metrics/page_policy.h"

#include "absl/strings/str_cat.h"

namespace shardd {

absl::StatusOr<PagePolicy> ParsePagePolicy(absl::string_view flag, absl::string_view text) {
  if (text == "off") return PagePolicy::kOff;
  if (text == "own") return PagePolicy::kOwn;
  if (text == "all") return PagePolicy::kAll;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": no such choice (got \"", text, "\", want own, all or off: whose jobs the page shows)"));
}

}  // namespace shardd
