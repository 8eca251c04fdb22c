#ifndef SHARDD_CLIENT_C_JOB_STORE_FAULTS_H_
#define SHARDD_CLIENT_C_JOB_STORE_FAULTS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "client/c/attachment/handle_set.h"
#include "client/c/job/optimizer_state.h"
#include "client/c/job/passes.h"
#include "client/c/job/windows.h"
#include "client/c/job/write_faults.h"

namespace shardd {

// Decides what a store into the job's protected memory means. The first one between passes opens the write window; one
// into the daemon's optimizer state stays in this process until it is loaded; any other goes to a private copy, and the
// next call returns why. Owns nothing. Async-signal-safe but for what an error costs.
class StoreFaults : public StoreFaultHandler {
 public:
  StoreFaults(Attachment& attachment, const HandleSet& handles, const Windows& windows, Passes& passes,
              OptimizerState& optimizer)
      : attachment_(attachment), handles_(handles), windows_(windows), passes_(passes), optimizer_(optimizer) {}

  bool OnStoreFault(const void* address) override;

 private:
  // Opens the window for the store, or returns why it is not allowed.
  absl::Status Allow(const void* address);

  Attachment& attachment_;
  const HandleSet& handles_;
  const Windows& windows_;
  Passes& passes_;
  OptimizerState& optimizer_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_STORE_FAULTS_H_
