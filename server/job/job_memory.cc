#include "server/job/job_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<JobMemory>> JobMemory::Create(const ShardPlan& plan, const std::string& job,
                                                             const std::string& state_dir, const std::string& directory,
                                                             int64_t reserved_bytes) {
  const MemoryPlan& want = plan.memory;
  const bool trainers_write = !plan.config.trainers_never_write();
  const bool in_trainers = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  // What trainers write is a sealed memfd: a file could be truncated under the daemon.
  const SlabBacking shards = trainers_write ? SlabBacking::kSealedMemfd : SlabBacking::kTmpfsFile;
  const SlabBacking optimizer = in_trainers ? SlabBacking::kSealedMemfd : SlabBacking::kTmpfsFile;
  const int64_t tmpfs =
      (trainers_write ? 0 : want.shards_bytes) + (in_trainers ? 0 : want.optimizer_bytes) + want.journal_bytes;
  const int64_t memfd = (trainers_write ? want.shards_bytes : 0) + (in_trainers ? want.optimizer_bytes : 0) +
                        want.kept_bytes + want.gradients_bytes + want.parameters_bytes + want.unsharded_pool_bytes +
                        want.session_bytes * static_cast<int64_t>(plan.world_size);
  SHARDD_ASSIGN_OR_RETURN(MemoryLimits limits, GetMemoryLimits(state_dir));
  const int64_t undo = WritebackUndoBytes(plan);
  if (absl::Status status = CheckMemory(limits, tmpfs, memfd + undo + reserved_bytes); !status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("open job \"", job, "\": ", status.message(), " (counted: the job's plan, ", undo,
                                     " bytes for the undo of a writeback, ", reserved_bytes, " promised to others)"));
  }
  if (mkdir(directory.c_str(), 0700) != 0) {
    return absl::InternalError(absl::StrCat("open job \"", job, "\": mkdir ", directory, ": ", std::strerror(errno)));
  }
  std::unique_ptr<JobMemory> memory(new JobMemory());
  memory->directory_ = directory;
  struct Purpose {
    std::unique_ptr<Slab>* slab;
    const char* name;
    SlabBacking backing;
    int64_t size_bytes;
  };
  const Purpose purposes[] = {
      {&memory->shards_, "shards", shards, want.shards_bytes},
      {&memory->gradients_, "gradients", SlabBacking::kSealedMemfd, want.gradients_bytes},
      {&memory->optimizer_, "optimizer", optimizer, want.optimizer_bytes},
      {&memory->parameters_, "parameters", SlabBacking::kMemfd, want.parameters_bytes},
      {&memory->pool_, "unsharded pool", SlabBacking::kMemfd, want.unsharded_pool_bytes},
  };
  for (const Purpose& purpose : purposes) {
    if (purpose.size_bytes == 0) {
      continue;
    }
    auto slab = Slab::Create(
        purpose.name, purpose.backing, purpose.size_bytes,
        purpose.backing == SlabBacking::kTmpfsFile ? absl::StrCat(directory, "/", purpose.name) : std::string());
    if (!slab.ok()) {
      return absl::Status(slab.status().code(), absl::StrCat("open job \"", job, "\": ", slab.status().message()));
    }
    *purpose.slab = *std::move(slab);
  }
  return memory;
}

absl::Status JobMemory::MakeKept(const ShardPlan& plan) {
  if (kept_ == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(kept_, Slab::Create("kept copy", SlabBacking::kMemfd, plan.memory.kept_bytes));
  }
  return absl::OkStatus();
}

JobMemory::~JobMemory() {
  shards_.reset();
  gradients_.reset();
  optimizer_.reset();
  unlink(absl::StrCat(directory_, "/journal").c_str());
  rmdir(directory_.c_str());
}

SlabPointers JobMemory::pointers() const {
  auto base = [](const std::unique_ptr<Slab>& slab) {
    return slab == nullptr ? nullptr : static_cast<char*>(slab->data());
  };
  return SlabPointers{base(shards_), base(parameters_), base(gradients_), base(optimizer_)};
}

int64_t JobMemory::allocated_bytes() const {
  int64_t total = 0;
  for (const Slab* slab : {shards(), parameters(), gradients(), optimizer(), pool(), kept()}) {
    total += slab == nullptr ? 0 : slab->size_bytes();
  }
  return total;
}

void JobMemory::Describe(const ShardPlan& plan, v1::Memory* out) const {
  auto add = [out](const char* name, int64_t planned, const Slab* slab) {
    v1::Purpose* purpose = out->add_purposes();
    purpose->set_purpose(name);
    purpose->set_planned_bytes(planned);
    if (slab != nullptr) {
      purpose->set_allocated_bytes(slab->size_bytes());
      purpose->set_backing(absl::StrCat(SlabBackingName(slab->backing()), slab->huge_pages() ? " (huge pages)" : ""));
    }
  };
  add("shards", plan.memory.shards_bytes, shards());
  add("parameters", plan.memory.parameters_bytes, parameters());
  add("gradients", plan.memory.gradients_bytes, gradients());
  add("optimizer", plan.memory.optimizer_bytes, optimizer());
  add("unsharded pool", plan.memory.unsharded_pool_bytes, pool());
  if (plan.memory.kept_bytes > 0) {
    add("kept copy", plan.memory.kept_bytes, kept());
  }
  v1::Purpose* journal = out->add_purposes();
  journal->set_purpose("journal");
  journal->set_planned_bytes(plan.memory.journal_bytes);
  journal->set_allocated_bytes(plan.memory.journal_bytes);  // allocated with the job
  journal->set_backing(std::string(SlabBackingName(SlabBacking::kTmpfsFile)));
}

}  // namespace shardd
