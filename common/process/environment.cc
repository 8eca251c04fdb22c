#include "common/process/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd {

std::string Environment(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

absl::StatusOr<int> EnvironmentNumber(const char* name, int smallest) {
  const std::string text = Environment(name);
  int value = -1;
  if (!text.empty() && (!absl::SimpleAtoi(text, &value) || value < smallest)) {
    return absl::InvalidArgumentError(absl::StrCat("attach: environment variable ", name, " is out of range (got \"",
                                                   text, "\", want a number of at least ", smallest, ")"));
  }
  return value;
}

std::string EnvironmentOf(absl::string_view prefix) {
  std::vector<absl::string_view> found;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (absl::StartsWith(*entry, prefix)) found.emplace_back(*entry);
  }
  std::sort(found.begin(), found.end());
  return absl::StrJoin(found, " ");
}

}  // namespace shardd
