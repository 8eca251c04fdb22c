#include "server/collective/nccl/trial.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "common/plan/plan.h"
#include "common/plan/slab_spread.h"
#include "common/shm/unique_fd.h"
#include "common/status/status_macros.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/nccl/nccl_collective.h"
#include "server/device/device.h"
#include "server/device/device_memory.h"

namespace shardd {
namespace {

constexpr int kTrialRuns = 3;  // counted; one more goes before them
constexpr size_t kMostTrialFileBytes = 64 << 10;
constexpr absl::string_view kWentWrong = "went wrong: ";  // in place of times

// One parameter, cut evenly over the ranks.
absl::StatusOr<ShardPlan> TrialPlan(int ranks) {
  v1::JobSpec spec;
  spec.set_name("trial");
  spec.set_world_size(ranks);
  spec.mutable_config()->set_trainers_never_write(true);
  v1::Module* const root = spec.mutable_tree()->add_modules();
  root->set_parent(-1);
  root->set_class_name("Trial");
  v1::Parameter* const parameter = root->add_parameters();
  parameter->set_name("weight");
  parameter->add_shape(kTrialBytes / static_cast<int64_t>(sizeof(float)) / ranks * ranks);
  parameter->set_dtype(v1::DTYPE_FLOAT32);
  parameter->set_requires_grad(true);
  return PlanShards(spec);
}

// What sums name. Shared, as their collective is: one that does not end may still come to it.
struct TrialMemory {
  ShardPlan plan;
  std::vector<std::shared_ptr<const DeviceSlab>> slots;  // by rank
  std::unique_ptr<DeviceSlab> gradients;
};

absl::StatusOr<std::shared_ptr<TrialMemory>> MakeTrialMemory(const std::vector<Device*>& devices) {
  auto memory = std::make_shared<TrialMemory>();
  const int ranks = static_cast<int>(devices.size());
  SHARDD_ASSIGN_OR_RETURN(memory->plan, TrialPlan(ranks));
  std::vector<DeviceMemory*> users;
  users.reserve(devices.size());
  for (Device* const device : devices) users.push_back(device->memory());
  for (DeviceMemory* const of_rank : users) {
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSlab> slab,
                            of_rank->MakeSlab("trial gradients", memory->plan.groups[0].gradient_bytes, users));
    memory->slots.push_back(std::move(slab));
  }
  SHARDD_ASSIGN_OR_RETURN(const int64_t page_bytes, users[0]->PageBytes());
  std::vector<DeviceMemory::Part> parts;
  for (const SlabPiece& piece : SpreadOverGpus(memory->plan, SpreadSlab::kGradients, ranks, page_bytes)) {
    parts.push_back({piece.gpu == kNoGpu ? nullptr : users[static_cast<size_t>(piece.gpu)], piece.size_bytes});
  }
  SHARDD_ASSIGN_OR_RETURN(memory->gradients, users[0]->MakeSpreadSlab("trial sums", parts, users));
  return memory;
}

// One sum; how long it took.
absl::StatusOr<absl::Duration> SumOnce(const std::shared_ptr<Collective>& collective,
                                       const std::shared_ptr<TrialMemory>& memory, absl::Duration limit) {
  struct End {
    absl::Notification came;
    absl::Status status;
  };
  auto end = std::make_shared<End>();
  ReduceScatterRequest request;
  request.plan = &memory->plan;
  for (size_t rank = 0; rank < memory->slots.size(); ++rank) {
    request.sources.push_back({static_cast<int>(rank), memory->slots[rank]->data(), {true}});
  }
  request.modes = {GradientMode::kOverwrite};
  request.gradients = memory->gradients->data();
  request.scale = 1.0F / static_cast<float>(memory->slots.size());
  request.label = "trial";
  const auto begin = std::chrono::steady_clock::now();
  collective->ReduceScatter(std::move(request), [end, memory, collective](absl::Status status) {
    end->status = std::move(status);
    end->came.Notify();
  });
  if (!end->came.WaitForNotificationWithTimeout(limit)) {
    return absl::DeadlineExceededError(absl::StrCat("a sum of ", kTrialBytes >> 20, " MiB by ", collective->name(),
                                                    " took longer than ", absl::FormatDuration(limit)));
  }
  SHARDD_RETURN_IF_ERROR(end->status);
  return absl::FromChrono(std::chrono::steady_clock::now() - begin);
}

absl::StatusOr<absl::Duration> BestOf(const std::shared_ptr<Collective>& collective,
                                      const std::shared_ptr<TrialMemory>& memory, absl::Duration limit) {
  SHARDD_RETURN_IF_ERROR(SumOnce(collective, memory, limit).status());
  absl::Duration best = absl::InfiniteDuration();
  for (int i = 0; i < kTrialRuns; ++i) {
    SHARDD_ASSIGN_OR_RETURN(const absl::Duration took, SumOnce(collective, memory, limit));
    best = std::min(best, took);
  }
  return best;
}

absl::StatusOr<std::string> ReadOwnFile(const std::string& path) {
  // Somebody else's pipe must not keep a daemon from its start.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat about = {};
  if (!fd.valid() || fstat(fd.get(), &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid()) {
    return absl::NotFoundError("no such file of this user");
  }
  std::string text(kMostTrialFileBytes, '\0');
  const ssize_t size_bytes = read(fd.get(), text.data(), text.size());
  text.resize(size_bytes < 0 ? 0 : static_cast<size_t>(size_bytes));
  return text;
}

}  // namespace

absl::StatusOr<TrialTimes> TryCollectives(const std::vector<Device*>& devices,
                                          std::shared_ptr<NcclCommunicator> communicator, absl::Duration limit) {
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<TrialMemory> memory, MakeTrialMemory(devices));
  TrialTimes times;
  SHARDD_ASSIGN_OR_RETURN(times.copies, BestOf(std::make_shared<LocalCollective>(devices), memory, limit));
  auto nccl = std::make_shared<NcclCollective>(devices, communicator);
  for (size_t rank = 0; rank < devices.size(); ++rank) nccl->SetSlots(static_cast<int>(rank), memory->slots[rank]);
  const absl::StatusOr<absl::Duration> by_nccl = BestOf(std::move(nccl), memory, limit);
  if (!by_nccl.ok()) {
    communicator->Break(by_nccl.status());
    return by_nccl.status();
  }
  times.nccl = *by_nccl;
  return times;
}

absl::StatusOr<TrialTimes> ReadTrial(const std::string& path, absl::string_view key) {
  SHARDD_ASSIGN_OR_RETURN(const std::string text, ReadOwnFile(path));
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  if (lines.size() != 3) return absl::NotFoundError("it is damaged");
  if (!key.empty() && lines[0] != key) return absl::NotFoundError("it is of another machine");
  if (absl::ConsumePrefix(&lines[1], kWentWrong)) return absl::FailedPreconditionError(lines[1]);
  const std::vector<absl::string_view> words = absl::StrSplit(lines[1], ' ');
  int64_t copies_ns = 0;
  int64_t nccl_ns = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &copies_ns) || !absl::SimpleAtoi(words[1], &nccl_ns) ||
      copies_ns <= 0 || nccl_ns <= 0) {
    return absl::NotFoundError("it is damaged");
  }
  return TrialTimes{absl::Nanoseconds(copies_ns), absl::Nanoseconds(nccl_ns)};
}

void WriteTrial(const std::string& path, absl::string_view key, const absl::StatusOr<TrialTimes>& result) {
  const std::string second =
      result.ok()
          ? absl::StrCat(absl::ToInt64Nanoseconds(result->copies), " ", absl::ToInt64Nanoseconds(result->nccl))
          : absl::StrCat(kWentWrong, absl::StrReplaceAll(result.status().message(), {{"\n", " "}}).substr(0, 4096));
  const std::string text = absl::StrCat(key, "\n", second, "\n");
  const std::string draft = absl::StrCat(path, ".", getpid());
  unlink(draft.c_str());  // of a process that had this number and was killed here
  bool written = false;
  {
    const UniqueFd fd(open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.valid()) return;
    written = write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }
  if (!written || rename(draft.c_str(), path.c_str()) != 0) unlink(draft.c_str());
}

CollectiveChoice ChooseByTimes(const TrialTimes& times, bool from_file) {
  const bool nccl = times.nccl * 10 <= times.copies * 9;
  return {nccl,
          absl::StrCat("NCCL took ", absl::ToInt64Microseconds(times.nccl), " us for a sum of ", kTrialBytes >> 20,
                       " MiB on each GPU, the GPUs' own copies ", absl::ToInt64Microseconds(times.copies), " us",
                       nccl ? "" : ", and it has to be a tenth faster",
                       from_file ? " (measured by an earlier start)" : "")};
}

}  // namespace shardd
