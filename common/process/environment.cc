#include "common/process/environment.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

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

}  // namespace shardd
