#ifndef SHARDD_COMMON_PROCESS_FLAGS_HELP_H_
#define SHARDD_COMMON_PROCESS_FLAGS_HELP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace shardd {

// The text for --help: `usage` ("shardd: what it is"), and the absl flags that are defined in `file`
// ("server/main.cc"). absl's own --help looks for them in files named like the program, finds none in a main.cc, and
// ends with status 1. Manual pages are made from this text (deploy/man).
std::string FlagsHelp(absl::string_view usage, absl::string_view file);

// Whether the arguments of main ask for it.
bool AsksForHelp(int argc, char** argv);

// absl::ParseCommandLine for a main.cc with these: --help prints FlagsHelp and --version the project's version, on
// standard output, and both end the process with status 0.
void ParseFlags(absl::string_view usage, absl::string_view file, int argc, char** argv);

}  // namespace shardd

#endif  // SHARDD_COMMON_PROCESS_FLAGS_HELP_H_
