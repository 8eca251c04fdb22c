#ifndef SHARDD_TESTS_E2E_RANKS_ATTACH_H_
#define SHARDD_TESTS_E2E_RANKS_ATTACH_H_

// What every rank begins with.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/report.h"

#define RETURN_IF_ERROR(expression)                     \
  do {                                                  \
    if (Status status_ = (expression); !status_.ok()) { \
      return status_;                                   \
    }                                                   \
  } while (false)

namespace shardd::e2e {

// As the test that started this process says: spec (a file), rank, address, replace, adopt, device_memory, node,
// timeout_ms.
inline Job::Options OptionsAsTold(const Args& args) {
  Job::Options options;
  std::ifstream spec(args.Text("spec"));
  options.spec_json.assign(std::istreambuf_iterator<char>(spec), std::istreambuf_iterator<char>());
  options.rank = args.Int("rank");
  options.address = args.Text("address");
  options.replace = args.Int("replace") != 0;
  options.adopt = args.Int("adopt") != 0;
  options.device_memory = args.Int("device_memory") != 0;
  options.node = args.Int("node");
  options.timeout_ms = args.Int("timeout_ms", 120'000);
  return options;
}
// With await_daemon=1 it tries again where nobody has listened, as a first attach says at once.
inline Status AttachAsTold(const Args& args, std::unique_ptr<Job>* job) {
  while (true) {
    Status status = Job::Attach(OptionsAsTold(args), job);
    const bool none =
        status.code() == Code::kUnavailable && status.message().find("no daemon there") != std::string::npos;
    if (!none || args.Int("await_daemon") == 0) return status;
    usleep(5000);
  }
}

// Notes how long it took, whatever came of it.
inline Status ReattachTimed(Job& job, TrainerReport* report) {
  const int64_t begin = NowMs();
  Status status = job.Reattach();
  report->waited_ms = std::max(report->waited_ms, NowMs() - begin);
  return status;
}

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_ATTACH_H_
