#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_TRIAL_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_TRIAL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

class Device;
class NcclCommunicator;

// How long one sum of gradients takes on this machine's GPUs, by either collective: the best of a few.
struct TrialTimes {
  absl::Duration copies;  // local/: every GPU reads all ranks' gradients
  absl::Duration nccl;    // the communicator's reduce-scatter, and what is left for the GPUs' own kernels
};

// Sums an fp32 gradient of this size on each of `devices`, which are the communicator's members in order, by either
// collective in turn, through the code that jobs use. Before any job: takes 5 / 4 of the bytes on each GPU for as long,
// and a few hundred ms, most of it for memory. After `limit` for one sum the communicator is broken. Errors of memory
// and of sums. DEADLINE_EXCEEDED: a sum did not end; the memory that it may still write is leaked.
inline constexpr int64_t kTrialBytes = int64_t{32} << 20;
absl::StatusOr<TrialTimes> TryCollectives(const std::vector<Device*>& devices,
                                          std::shared_ptr<NcclCommunicator> communicator, absl::Duration limit);

// A trial's result, kept in a file of this user: its first line is the key (whatever a measurement depends on, without
// line breaks), its second the times in ns, or why there are none. NOT_FOUND: there is no such file, it is another
// user's, of another key (empty: any will do) or damaged. FAILED_PRECONDITION: the error of a trial that went wrong.
absl::StatusOr<TrialTimes> ReadTrial(const std::string& path, absl::string_view key);
// Replaces the file as a whole. Best effort: without it the next start measures again.
void WriteTrial(const std::string& path, absl::string_view key, const absl::StatusOr<TrialTimes>& result);

// Whether NCCL is to sum, and why in words: it is if it takes at least a tenth less time, because another order of
// additions is not worth a difference that another start might not see.
struct CollectiveChoice {
  bool nccl = false;
  std::string reason;
};
CollectiveChoice ChooseByTimes(const TrialTimes& times, bool from_file);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_TRIAL_H_
