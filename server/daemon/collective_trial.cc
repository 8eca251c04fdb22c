#include "server/daemon/collective_trial.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/clock/monotonic_now.h"
#include "common/cuda/driver.h"
#include "common/process/environment.h"
#include "common/process/spawn.h"
#include "common/status/status_macros.h"
#include "common/version.h"
#include "server/collective/nccl/nccl_communicators.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr absl::Duration kSumLimit = absl::Seconds(5);  // of a sum that takes a millisecond
// The kernel module's version: cuDriverGetVersion gives the same for all drivers of one CUDA version.
constexpr char kDriverVersionFile[] = "/sys/module/nvidia/version";

// Whatever a trial's result depends on.
std::string TrialKey(const CollectiveFlags& flags, const Devices& made, const NcclLibrary& library) {
  int cuda = 0;
  (void)(*made.driver)->DriverGetVersion(&cuda);
  std::string driver;
  std::getline(std::ifstream(kDriverVersionFile), driver);
  std::string key =
      absl::StrCat("shardd ", kVersion, ", driver ", driver, " of CUDA ", cuda, ", NCCL ", library.version(),
                   flags.nccl_windows ? " with windows, " : ", ", EnvironmentOf("NCCL_"));
  for (const GpuFacts& gpu : made.gpus) {
    absl::StrAppend(&key, ", ", gpu.device, " ", gpu.description, " at ", gpu.pci_bus_id, " MPS ", gpu.mps);
  }
  return absl::StrReplaceAll(key, {{"\n", " "}});
}

// Runs the trial's process. OK: it has ended, in whatever way.
absl::Status AwaitTrial(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {"/proc/self/exe", "--collective_trial"};  // also if another program lies there now
  if (!arguments.empty()) argv.insert(argv.end(), arguments.begin() + 1, arguments.end());
  SHARDD_ASSIGN_OR_RETURN(const DetachedProcess process, SpawnDetached(argv, STDERR_FILENO, /*folder=*/"."));
  const absl::Time deadline = MonotonicNow() + kTrialLimit;
  pollfd end{process.pidfd.get(), POLLIN, 0};
  while (process.pidfd.valid()) {
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      TerminateDetached(process);
      return absl::DeadlineExceededError(
          absl::StrCat("its process (pid ", process.pid, ") took longer than ", absl::FormatDuration(kTrialLimit)));
    }
    const int events = poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (events > 0 || (events < 0 && errno != EINTR)) break;
  }
  (void)waitpid(process.pid, nullptr, WNOHANG);  // whose parent this is where it is process 1 of a container
  return absl::OkStatus();
}

absl::StatusOr<TrialTimes> TryBoth(const CollectiveFlags& flags, const Devices& made, const NcclLibrary& library) {
  std::vector<int> ordinals;
  std::vector<Device*> devices;
  for (const GpuFacts& gpu : made.gpus) ordinals.push_back(gpu.ordinal);
  for (const auto& device : made.devices) devices.push_back(device.get());
  NcclCommunicators communicators(library, *made.driver, std::move(ordinals), flags.nccl_windows);
  SHARDD_ASSIGN_OR_RETURN(std::shared_ptr<NcclCommunicator> communicator,
                          communicators.For(static_cast<int>(devices.size())));
  absl::StatusOr<TrialTimes> times = TryCollectives(devices, communicator, kSumLimit);
  if (!times.ok()) new std::shared_ptr<NcclCommunicator>(std::move(communicator));  // may hang as it ends
  return times;
}

}  // namespace

CollectiveChoice ChooseByTrial(const CollectiveFlags& flags, const Devices& made, const NcclLibrary& library) {
  if (flags.embedded) return {false, "a daemon that a program has started makes no trial of NCCL"};
  const std::string key = TrialKey(flags, made, library);
  absl::StatusOr<TrialTimes> result = ReadTrial(flags.trial_file, flags.takes_over ? "" : key);
  const bool is_kept = !absl::IsNotFound(result.status());
  if (flags.takes_over) {
    if (!is_kept) return {false, "the daemon whose place this one took has left no result of a trial"};
    WriteTrial(flags.trial_file, key, result);  // if this one is killed, the next start goes by it as well
  } else if (!is_kept) {
    LogInfo("tries which collective is faster, before it listens");
    const absl::Status ended = AwaitTrial(flags.arguments);
    result = ReadTrial(flags.trial_file, key);
    if (absl::IsNotFound(result.status())) {
      result = ended.ok() ? absl::UnavailableError("its process ended without a result; the log may say more") : ended;
      WriteTrial(flags.trial_file, key, result);
    }
  }
  if (result.ok()) return ChooseByTimes(*result, is_kept);
  return {false, absl::StrCat("a trial of both went wrong: ", result.status().message(),
                              is_kept ? " (in an earlier start; " : " (", "without the file \"", flags.trial_file,
                              "\" the next start tries again)")};
}

absl::Status RunTrial(const CollectiveFlags& flags) {
  alarm(static_cast<unsigned>(absl::ToInt64Seconds(kTrialLimit)));  // the daemon that waits for it may be gone
  SHARDD_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load(flags.nccl_library));
  // Never destroyed: with a hung sum they would wait for it.
  auto* const made = new absl::StatusOr<Devices>(MakeDevices(flags.devices));
  SHARDD_RETURN_IF_ERROR(made->status());
  if ((*made)->driver == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("--collective_trial: it is for GPUs (got --devices=", flags.devices, ", want cuda:...)"));
  }
  WriteTrial(flags.trial_file, TrialKey(flags, **made, library), TryBoth(flags, **made, library));
  return absl::OkStatus();
}

}  // namespace shardd
