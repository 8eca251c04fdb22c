#include "common/process/flags_help.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/version.h"

namespace shardd {
namespace {

// `text` in lines of at most 100 characters, each after `indent`.
std::string Wrapped(absl::string_view text, absl::string_view indent) {
  std::vector<std::string> lines(1, std::string(indent));
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (lines.back().size() > indent.size() && lines.back().size() + 1 + word.size() > 100) {
      lines.emplace_back(indent);
    }
    absl::StrAppend(&lines.back(), lines.back().size() > indent.size() ? " " : "", word);
  }
  return absl::StrJoin(lines, "\n");
}

}  // namespace

std::string FlagsHelp(absl::string_view usage, absl::string_view file) {
  std::map<std::string, const absl::CommandLineFlag*> flags;  // by name
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), file)) flags.emplace(name, flag);
  }
  const absl::string_view program = usage.substr(0, usage.find(':'));
  std::string text = absl::StrCat(usage, "\n\nusage: ", program,
                                  " [--flag=value...]\n\nflags (--helpfull: also absl's and gRPC's):\n");
  for (const auto& [name, flag] : flags) {
    absl::StrAppend(&text, "  --", name, "=", flag->DefaultValue().empty() ? "\"\"" : flag->DefaultValue(), "\n",
                    Wrapped(flag->Help(), "      "), "\n");
  }
  absl::StrAppend(&text, "  --version\n      print the version\n  --flagfile=\n      read flags from this file\n");
  return text;
}

bool AsksForHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](absl::string_view argument) {
    return argument == "--help" || argument == "-help" || argument == "-h" || argument == "--help=true";
  });
}

void ParseFlags(absl::string_view usage, absl::string_view file, int argc, char** argv) {
  if (AsksForHelp(argc, argv)) {
    std::fputs(FlagsHelp(usage, file).c_str(), stdout);
    std::exit(std::fflush(stdout) == 0 ? 0 : 1);
  }
  absl::SetProgramUsageMessage(usage);
  absl::FlagsUsageConfig config;
  config.version_string = [program = std::string(usage.substr(0, usage.find(':')))] {
    return absl::StrCat(program, " ", kVersion, "\n");
  };
  absl::SetFlagsUsageConfig(config);
  absl::ParseCommandLine(argc, argv);
}

}  // namespace shardd
