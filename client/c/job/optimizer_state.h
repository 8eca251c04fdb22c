#ifndef SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_
#define SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_

#include "client/c/attachment/attachment.h"
#include "client/c/job/read_only_memory.h"

namespace shardd {

// Finds optimizer state in the job's slab. The daemon's is read-only. Owns nothing. Thread-compatible.
class OptimizerState {
 public:
  OptimizerState(Attachment& attachment, ReadOnlyMemory& read_only) : attachment_(attachment), read_only_(read_only) {}

  // Returns state number `state` of a parameter, or null if there is none. The first call maps the slab.
  void* Data(int param, int state);

 private:
  Attachment& attachment_;
  ReadOnlyMemory& read_only_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_OPTIMIZER_STATE_H_
