// What a custodian keeps of a job, when it is not what a daemon has left: the record of the job, its journal, its
// take-up log and the memory of values that were loaded. Torn bytes, and records that are whole and say something else.

#include <fcntl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "server/daemon/take_up/taken_up_job.h"
#include "tests/fuzz/require.h"

namespace shardd {
namespace {

constexpr int kWorld = 2;

// Takes numbers and bytes off the input; zeros behind its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  uint8_t Byte() { return empty() ? 0 : *at_++; }
  uint32_t Number() { return static_cast<uint32_t>(Byte()) << 16 | static_cast<uint32_t>(Byte()) << 8 | Byte(); }
  // Small ones, or any.
  int64_t Count() { return Byte() % 4 != 0 ? Byte() % 4 : static_cast<int64_t>(uint64_t{Number()} << 40 | Number()); }
  // A message out of the next bytes, with what could be parsed of it.
  template <typename Message>
  Message Parse() {
    Message message;
    const size_t size = std::min<size_t>(Byte(), static_cast<size_t>(end_ - at_));
    (void)message.ParsePartialFromArray(at_, static_cast<int>(size));
    at_ += size;
    return message;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

v1::JobSpec MakeSpec(int kind) {
  v1::JobSpec spec;
  spec.set_name("fuzz");
  spec.set_world_size(kWorld);
  v1::JobConfig& config = *spec.mutable_config();
  config.mutable_optimizer()->set_kind(kind == 1 ? v1::OPTIMIZER_KIND_TRAINER : v1::OPTIMIZER_KIND_ADAMW);
  config.set_trainers_never_write(kind == 0);
  config.set_pass_copies(kind != 0);
  if (kind == 2) config.mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  v1::Module& root = *spec.mutable_tree()->add_modules();
  root.set_parent(-1);
  for (const int64_t numel : {5, 130}) {
    v1::Parameter& parameter = *root.add_parameters();
    parameter.set_name("p" + std::to_string(numel));
    parameter.set_dtype(v1::DTYPE_FLOAT32);
    parameter.set_requires_grad(true);
    parameter.add_shape(numel);
  }
  return spec;
}

const ShardPlan& PlanOf(int kind) {
  static std::map<int, ShardPlan> plans;
  if (const auto it = plans.find(kind); it != plans.end()) return it->second;
  absl::StatusOr<ShardPlan> plan = PlanShards(MakeSpec(kind));
  REQUIRE(plan.ok());
  return plans.emplace(kind, *std::move(plan)).first->second;
}

// Right for the plan, so that what follows changes one thing of it at a time.
v1::DecidedStepRecord Decided(const ShardPlan& plan, int64_t step, Input& input) {
  v1::DecidedStepRecord record;
  record.set_epoch(1);
  record.set_step(step);
  for (int group = 0; group <= plan.config.optimizer().groups_size(); ++group) record.add_groups()->set_lr(0.1);
  record.set_clip_factor(1);
  record.set_present("\x3");
  for (size_t param = 0; param < plan.params.size(); ++param) record.add_step_counts(step - 1);
  for (int rank = 0; rank < kWorld; ++rank) record.add_trainer_states("state");
  if (input.Byte() % 2 == 0) record.MergeFrom(input.Parse<v1::DecidedStepRecord>());
  record.set_step(step);
  if (input.Byte() % 4 == 0) record.clear_step_counts();
  if (input.Byte() % 4 == 0) record.clear_groups();
  return record;
}

v1::CommittedRecord Committed(const ShardPlan& plan, Input& input) {
  v1::CommittedRecord record;
  for (size_t param = 0; param < plan.params.size(); ++param) record.add_step_counts(input.Byte());
  for (int rank = 0; rank < kWorld; ++rank) record.add_trainer_states("");
  if (input.Byte() % 2 == 0) record.MergeFrom(input.Parse<v1::CommittedRecord>());
  return record;
}

void ChangeBytes(Slab& slab, Input& input) {
  for (int i = input.Byte() % 8; i > 0; --i) {
    slab.At<char>(0)[input.Number() % slab.size_bytes()] = static_cast<char>(input.Byte());
  }
}

// Another mapping of what is kept, as a daemon before had one.
std::unique_ptr<Slab> MapAgain(int fd, int64_t size_bytes) {
  absl::StatusOr<std::unique_ptr<Slab>> slab =
      Slab::TakeUp("fuzz", UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), size_bytes);
  REQUIRE(slab.ok());
  return *std::move(slab);
}

void Put(JobMemory::Kept& kept, const char* name, int fd) { kept[name] = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

void WriteLog(TakeUpLog& log, const ShardPlan& plan, Input& input) {
  const TakeUpLog::Header header = {1, input.Count(), static_cast<uint64_t>(input.Count())};
  const auto counts = static_cast<TakeUpLog::Counts>(input.Byte() % 4);
  if (input.Byte() % 2 == 0) {
    log.CommitStep(header);
  } else {
    (void)log.Commit(Committed(plan, input), header, counts);
  }
  if (input.Byte() % 2 == 0) {
    UpdateLog& update = log.update(input.Byte() % kWorld);
    update.Begin(input.Byte() % 2 == 0 ? (header.step & 0xffff) + 1 : input.Count(), input.Count(), input.Count());
    update.Begun(input.Count(), input.Count());
    if (input.Byte() % 2 == 0) update.Done(input.Count());
  }
  if (input.Byte() % 4 == 0) log.Touch();
  if (input.Byte() % 4 == 0) log.Finish();
  if (input.Byte() % 4 == 0) log.SnapshotTaken(/*shards_in_copies=*/input.Byte() % 2 == 0);
  if (input.Byte() % 4 == 0) log.SetProcess(0, {static_cast<int32_t>(input.Number()), 0, input.Number()});
}

void Fuzz(const uint8_t* data, size_t size) {
  Input input(data, size);
  const int kind = input.Byte() % 3;
  const ShardPlan& plan = PlanOf(kind);
  const TakeUpLog::Sizes sizes = TakeUpLog::SizesFor(plan);
  JobMemory::Kept kept;
  {
    absl::StatusOr<std::unique_ptr<JobMemory>> memory = JobMemory::Create(plan, "fuzz");
    absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Create(sizes.place_bytes);
    absl::StatusOr<std::unique_ptr<TakeUpLog>> log = TakeUpLog::Create(sizes);
    REQUIRE(memory.ok() && journal.ok() && log.ok());
    REQUIRE((*memory)
                ->KeepBy([&kept](const std::string& name, int fd) {
                  Put(kept, name.c_str(), fd);
                  return absl::OkStatus();
                })
                .ok());
    v1::CustodyJob job;
    job.set_format(1);
    *job.mutable_spec() = MakeSpec(kind);
    job.set_plan_digest(plan.digest);
    if (input.Byte() % 4 == 0) job.MergeFrom(input.Parse<v1::CustodyJob>());
    const absl::StatusOr<std::unique_ptr<Slab>> record = MakeCustodyRecord(kCustodyJobName, job);
    REQUIRE(record.ok());
    for (int steps = input.Byte() % 3; steps > 0; --steps) {
      const int64_t step = std::max<int64_t>(1, input.Count());
      (void)(*journal)->WriteDecided(Decided(plan, step, input));
    }
    WriteLog(**log, plan, input);
    Put(kept, kCustodyJobName, (*record)->fd());
    Put(kept, kCustodyJournalName, (*journal)->fd());
    Put(kept, kCustodyLogName, (*log)->fd());
    if (input.Byte() % 4 == 0) ChangeBytes(**record, input);
    const std::unique_ptr<Slab> log_bytes = MapAgain((*log)->fd(), (*log)->size_bytes());
    if (input.Byte() % 4 == 0) ChangeBytes(*log_bytes, input);
    if (input.Byte() % 16 == 0 && !kept.empty()) kept.erase(std::next(kept.begin(), input.Byte() % kept.size()));
  }
  const TakeUpOn on = {{}, [](int) { return SlabPlace(); }};
  const absl::StatusOr<TakenUpJob> job = ReadTakenUpJob(std::move(kept), on);
  if (!job.ok()) {
    REQUIRE(!job.status().message().empty());
    return;
  }
  REQUIRE(job->committed.version > 0);
  REQUIRE(job->committed.step_counts.size() == job->plan.params.size());
  REQUIRE(job->committed.trainer_states.size() == static_cast<size_t>(job->plan.world_size));
  REQUIRE(job->memory != nullptr && job->memory->shards() != nullptr);
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const google::protobuf::LogSilencer quiet;
  shardd::Fuzz(data, size);
  return 0;
}
