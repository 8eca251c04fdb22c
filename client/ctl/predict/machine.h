#ifndef SHARDD_CLIENT_CTL_PREDICT_MACHINE_H_
#define SHARDD_CLIENT_CTL_PREDICT_MACHINE_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd::ctl {

// What one group's own computation takes, where it is known: measured kernel times, or operations.
struct GroupCost {
  double forward_s = -1;  // of one step; below zero: by operations
  double backward_s = -1;
  double forward_flops_per_token = -1;  // below zero: two for each element of its matrices
};

// A description of a rank and its links, for predictions. Rates are what is reached, not what a data sheet promises.
struct Machine {
  std::string name;
  // Trainers run ahead of a GPU. On CPUs they ask for a group when they need it, and a node's ranks share its copy.
  bool gpus = true;
  // The daemon works on the ranks' own cores, as where there are no more of these than ranks: what it moves while they
  // compute slows them.
  bool shares_cores = false;
  double flops_per_s = 0;                   // of one rank, in matrix products
  double memory_bytes_per_s = 0;            // of one rank, read and written together
  double device_link_bytes_per_s = 0;       // of one rank to its node's other ranks, in each direction
  double node_link_bytes_per_s = 0;         // of one rank to other nodes, in each direction
  double transfer_s = 0;                    // what a gather or a reduction takes besides its bytes
  double other_node_s = 0;                  // and besides, for each other node
  double request_s = 0;                     // of a trainer, for each request of a group
  double step_s = 0;                        // of a step, once: its commit on all nodes, the launch of the next
  std::map<std::string, GroupCost> groups;  // by the group's name
};

// Reads a JSON object whose members are named as above in camelCase ("flopsPerS"). INVALID_ARGUMENT: it is none, a
// member is unknown, or of another type, or a rate is missing or not above zero.
absl::StatusOr<Machine> ParseMachine(absl::string_view json);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_MACHINE_H_
