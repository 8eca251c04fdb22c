#ifndef SHARDD_SERVER_OPTIMIZER_DECIDED_STEP_H_
#define SHARDD_SERVER_OPTIMIZER_DECIDED_STEP_H_

#include <cstdint>
#include <vector>

#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Starts of a job's slabs; `parameters` is nullptr if there is no cast copy.
struct SlabPointers {
  char* shards = nullptr;
  char* parameters = nullptr;
  char* gradients = nullptr;
  char* optimizer = nullptr;
  char* workspace = nullptr;  // of the ranks' threads, for Muon; nullptr: none, or whoever runs an operation makes one
};

// The decision of a step; constant from decision to commit.
struct DecidedStep {
  std::vector<v1::HyperParameters> groups;  // one per optimizer group
  double clip_factor = 1;
  std::vector<bool> present;         // by parameter: it has a gradient
  std::vector<int64_t> step_counts;  // by parameter: updates before this step
  bool is_part = false;              // v1::Step.part: the step that commits it makes cast copies, too
};

}  // namespace shardd

#endif  // SHARDD_SERVER_OPTIMIZER_DECIDED_STEP_H_
