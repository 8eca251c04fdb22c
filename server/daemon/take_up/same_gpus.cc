#include "server/daemon/take_up/same_gpus.h"

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/device/device_memory.h"

namespace shardd {

absl::Status CheckSameGpus(const v1::CustodyJob& job, const SlabPlace& place) {
  const auto names = [](const auto& uuids) {
    return absl::StrJoin(
        uuids, ", ", [](std::string* out, const auto& uuid) { absl::StrAppend(out, absl::BytesToHexString(uuid)); });
  };
  std::vector<std::string> got;
  for (const DeviceMemory* memory : place.users) got.push_back(memory->device_uuid());
  if (std::equal(got.begin(), got.end(), job.gpu_uuids().begin(), job.gpu_uuids().end())) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("its ranks are on other devices (got GPUs with UUIDs \"", names(got), "\", want \"",
                   names(job.gpu_uuids()), "\"; none: the host); start the daemon with the --devices of before"));
}

}  // namespace shardd
