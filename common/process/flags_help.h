#ifndef SHARDD_COMMON_PROCESS_FLAGS_HELP_H_
#define SHARDD_COMMON_PROCESS_FLAGS_HELP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace shardd {

// The text for --help: `usage`, and the absl flags that are defined in `file` ("server/main.cc"). absl's own --help
// looks for them in files named like the program, finds none in a main.cc, and ends with status 1.
std::string FlagsHelp(absl::string_view usage, absl::string_view file);

// Whether the arguments of main ask for it.
bool AsksForHelp(int argc, char** argv);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_FLAGS_HELP_H_
