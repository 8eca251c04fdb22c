#ifndef SHARDD_TESTS_TORCH_WORKER_OPTIONS_H_
#define SHARDD_TESTS_TORCH_WORKER_OPTIONS_H_

// The processes that the tests start: `<test binary> --worker <options as JSON>`.

#include <map>
#include <string>
#include <vector>

namespace shardd_test {

struct WorkerOptions {
  // train; probe: what the module's tensors are, without training; refusals: what Shard refuses; full_params;
  // edit: full parameters edited by all
  std::string mode = "train";
  std::string address = {};  // empty: the unsharded reference, one process for all ranks
  std::string out = {};      // the results, JSON
  std::string job = "job";
  std::vector<std::string> nodes = {};  // addresses for each other; none: one node. Each has as many of the ranks
  int ranks = 1;
  int rank = 0;
  // plain; tied: within a group and across groups; frozen: a group, and one parameter of another; absent: parameters
  // without gradient on some ranks or steps; towers: groups whose inputs need no gradient; order: ranks run towers in
  // different order
  std::string model = "plain";
  std::string strategy = "full_shard";
  std::string layout = "flat";
  std::string unshard_mode = "zero_copy";
  std::string prefetch = "pre";
  std::string optimizer = "adamw";
  std::string dtype = "fp32";
  bool float8_gathers = false;
  int steps = 50;
  int accumulate = 1;
  bool recompute = false;  // cells run again in backward, as with torch.utils.checkpoint; the reference's do not
  double penalty = 0;      // on the square of the loss's gradient in x, which takes a double backward
  bool overlap = false;    // all micro-batches forward, then all backward
  double clip = 0;
  std::string norm = "2";   // of clipping: a number, or inf
  int fail_at = -1;         // user code throws in the backward of this step, once; it is done again
  bool two_groups = false;  // biases are optimizer group 1, with their own hyperparameters
  bool replace = false;
  // FQN -> ignored, replicate or already_sharded. The trainer updates these itself.
  std::map<std::string, std::string> left_out = {};
  std::string own_job = {};  // FQN of a cell that is sharded in a job of its own and already_sharded in the other
  bool same_data = false;    // all ranks have rank 0's, so what they update alone stays equal
  bool strict_order = false;
  int by_name = -1;  // this rank says by name which modules are sharded, the others by class
  int kill_at = -1;  // the rank ends itself, or `victim`, with SIGKILL in the backward of this step
  int victim = 0;    // a process, which may be gone already where a step is done again
};

std::string ToJson(const WorkerOptions& options);
WorkerOptions FromJson(const std::string& text);

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_WORKER_OPTIONS_H_
