#include "server/daemon/collectives.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/collective/collective.h"
#ifdef SHARDD_NO_GPUS
#include "common/cuda/no_kernels.h"
#else
#include "common/cuda/driver.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/nccl/nccl_collective.h"
#include "server/collective/nccl/nccl_communicators.h"
#include "server/collective/nccl/nccl_library.h"
#include "server/collective/nccl/trial.h"
#include "server/collective/nodes/nccl/lazy_exchanges.h"
#include "server/daemon/collective_trial.h"
#include "server/observe/log.h"
#endif

namespace shardd {
namespace {

absl::Status CheckFlag(const CollectiveFlags& flags, bool on_gpus) {
  const bool for_any = flags.collective == "auto" || flags.collective == "local";
  if (for_any || (flags.collective == "nccl" && on_gpus)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--collective: ", flags.collective == "nccl" ? "NCCL is for GPUs" : "unknown", " (got \"", flags.collective,
      "\" with --devices=", flags.devices, ", want auto, local, or nccl with --devices=cuda:...)"));
}

}  // namespace

#ifdef SHARDD_NO_GPUS

void SetCollectiveEnvironment() {}

absl::Status SetCollectives(const CollectiveFlags& flags, const Devices&, CoreOptions*) {
  return CheckFlag(flags, /*on_gpus=*/false);
}

absl::Status RunTrial(const CollectiveFlags&) { return absl::UnimplementedError(kNoGpuCode); }

#else

namespace {

std::unique_ptr<Collective> MakeCollective(const std::shared_ptr<NcclCommunicators>& communicators,
                                           const std::vector<Device*>& devices) {
  const int ranks = static_cast<int>(devices.size());
  auto communicator = communicators->For(ranks);
  if (!communicator.ok()) {
    LogWarning(absl::StrCat("gradients are summed by copies: ", communicator.status().message()));
    return std::make_unique<LocalCollective>(devices, std::string(communicator.status().message()));
  }
  return std::make_unique<NcclCollective>(devices, *std::move(communicator),
                                          [communicators, ranks] { return communicators->For(ranks); });
}

// "cuda:0 does not reach cuda:1", or nothing.
std::string Unreached(const Devices& made) {
  for (const GpuFacts& from : made.gpus) {
    for (const GpuFacts& to : made.gpus) {
      int can = 0;
      if (from.ordinal != to.ordinal &&
          ((*made.driver)->DeviceCanAccessPeer(&can, from.ordinal, to.ordinal) != CUDA_SUCCESS || can == 0)) {
        return absl::StrCat(from.device, " does not reach ", to.device);
      }
    }
  }
  return "";
}

CollectiveChoice Choose(const CollectiveFlags& flags, const Devices& made, const NcclLibrary& library) {
  const std::string unreached = Unreached(made);
  if (unreached.empty()) return ChooseByTrial(flags, made, library);
  return {true, absl::StrCat("the GPUs do not reach each other's memory (", unreached, ")")};
}

// Null: copies. `why`: for status.
absl::StatusOr<std::shared_ptr<NcclCommunicators> > CommunicatorsFor(const CollectiveFlags& flags, const Devices& made,
                                                                     std::string* why) {
  const bool by_name = flags.collective == "nccl";
  if (flags.collective == "local") {
    *why = "local: --collective=local";
    return nullptr;
  }
  if (!by_name && made.devices.size() < 2) {
    *why = "local: there is one GPU";
    return nullptr;
  }
  const absl::StatusOr<NcclLibrary> library = NcclLibrary::Load(flags.nccl_library);
  if (!library.ok()) {
    if (by_name) return library.status();
    *why = absl::StrCat("local: ", library.status().message());
    return nullptr;
  }
  const CollectiveChoice choice = by_name ? CollectiveChoice{true, "--collective=nccl"} : Choose(flags, made, *library);
  *why = absl::StrCat(choice.nccl ? "nccl: " : "local: ", choice.reason);
  if (!choice.nccl) return nullptr;
  std::vector<int> ordinals;
  for (const GpuFacts& gpu : made.gpus) ordinals.push_back(gpu.ordinal);
  return std::make_shared<NcclCommunicators>(*library, *made.driver, std::move(ordinals), flags.nccl_windows);
}

}  // namespace

void SetCollectiveEnvironment() { NcclLibrary::SetEnvironment(); }

absl::Status SetCollectives(const CollectiveFlags& flags, const Devices& made, CoreOptions* options) {
  const bool on_gpus = made.driver != nullptr;
  SHARDD_RETURN_IF_ERROR(CheckFlag(flags, on_gpus));
  if (!on_gpus) return absl::OkStatus();
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<NcclCommunicators> communicators,
                          CommunicatorsFor(flags, made, &options->collective));
  LogInfo(absl::StrCat("gradients between GPUs: ", options->collective));
  if (communicators != nullptr) {
    options->nccl_by_name = flags.collective == "nccl";
    options->make_collective = [communicators](const std::vector<Device*>& devices) {
      return MakeCollective(communicators, devices);
    };
  }
  options->node_exchanges = [exchanges = new LazyExchanges(*made.driver, made.gpus, flags.nccl_library)](
                                const std::string& job,
                                NcclExchangeOptions of_job) -> absl::StatusOr<std::unique_ptr<NcclExchange> > {
    SHARDD_ASSIGN_OR_RETURN(NcclExchanges * of_daemon, exchanges->Get());
    return of_daemon->Make(job, std::move(of_job));
  };
  return absl::OkStatus();
}

#endif

}  // namespace shardd
