#ifndef SHARDD_TESTS_E2E_RANKS_PRECISION_H_
#define SHARDD_TESTS_E2E_RANKS_PRECISION_H_

// In what dtypes a group is unsharded and reduced. Of the job: param_dtype, reduce_dtype, keep_low, float8. Of a group,
// in place of all of these: mixed=GROUP:PARAM_DTYPE/REDUCE_DTYPE[/kept],...; an empty dtype is none, and float8 false.

#include <sstream>
#include <string>

#include "tests/e2e/ranks/args.h"

namespace shardd::e2e {

struct Precision {
  std::string param_dtype;   // "": as stored
  std::string reduce_dtype;  // "": as submitted
  bool keep_low = false;
  bool float8 = false;  // MixedPrecision.float8_gathers
};

inline bool HasOwnPrecision(const Args& args, const std::string& group) {
  return ("," + args.Text("mixed")).find("," + group + ":") != std::string::npos;
}

inline Precision PrecisionOf(const Args& args, const std::string& group) {
  std::istringstream items(args.Text("mixed"));
  for (std::string item; std::getline(items, item, ',');) {
    const size_t colon = item.find(':');
    const size_t slash = item.find('/', colon);
    if (item.substr(0, colon) != group) continue;
    const size_t end = item.find('/', slash + 1);
    return {item.substr(colon + 1, slash - colon - 1), item.substr(slash + 1, end - slash - 1),
            end != std::string::npos, false};
  }
  return {args.Text("param_dtype"), args.Text("reduce_dtype"), args.Int("keep_low") != 0, args.Int("float8") != 0};
}

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_PRECISION_H_
