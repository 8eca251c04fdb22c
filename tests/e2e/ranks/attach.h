#ifndef SHARDD_TESTS_E2E_RANKS_ATTACH_H_
#define SHARDD_TESTS_E2E_RANKS_ATTACH_H_

// What every rank begins with.

#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"

#define RETURN_IF_ERROR(expression)                     \
  do {                                                  \
    if (Status status_ = (expression); !status_.ok()) { \
      return status_;                                   \
    }                                                   \
  } while (false)

namespace shardd::e2e {

// As the test that started this process says: spec (a file), rank, address, replace, device_memory, node,
// timeout_ms.
inline Job::Options OptionsAsTold(const Args& args) {
  Job::Options options;
  std::ifstream spec(args.Text("spec"));
  options.spec_json.assign(std::istreambuf_iterator<char>(spec), std::istreambuf_iterator<char>());
  options.rank = args.Int("rank");
  options.address = args.Text("address");
  options.replace = args.Int("replace") != 0;
  options.device_memory = args.Int("device_memory") != 0;
  options.node = args.Int("node");
  options.timeout_ms = args.Int("timeout_ms", 120'000);
  return options;
}
inline Status AttachAsTold(const Args& args, std::unique_ptr<Job>* job) {
  return Job::Attach(OptionsAsTold(args), job);
}

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_ATTACH_H_
