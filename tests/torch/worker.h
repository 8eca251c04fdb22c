#ifndef SHARDD_TESTS_TORCH_WORKER_H_
#define SHARDD_TESTS_TORCH_WORKER_H_

#include <string>

namespace shardd_test {

// What a process started with `--worker <options>` does: trains a tiny model, sharded or as the reference, and writes
// the losses and (rank 0, reference) the final parameters. The exit status.
int RunWorker(const std::string& options_json);

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_WORKER_H_
