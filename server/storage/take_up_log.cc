#include "server/storage/take_up_log.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/pass_copies.h"
#include "common/process/kept_write.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/device/device_memory.h"
#include "server/storage/record_place.h"

namespace shardd {
namespace {

constexpr char kTakeUpMagic[4] = {'S', 'H', 'T', 'U'};
constexpr char kTakeUpName[] = "take-up log";

struct RawTakeUpHeader {
  char magic[4];
  uint32_t format;
  uint64_t sequence;
  uint64_t epoch;
  int64_t step;
  uint64_t version;
  uint32_t facts;
  uint32_t flags;
  uint32_t counts;
  uint32_t crc;
  char zero[8];
};
static_assert(sizeof(RawTakeUpHeader) == 64);

constexpr uint32_t kTouched = 1;
constexpr uint32_t kPromised = 2;
constexpr uint32_t kFinished = 4;
constexpr uint32_t kPromisedValues = 8;
constexpr uint32_t kSecond = 16;
// In the place of kSnapshotBeingTaken, so that a daemon that does not know of it refuses the log.
constexpr uint32_t kCountsBehindPass = 3;
// Beside any of these, likewise.
constexpr uint32_t kCountsWriting = 4;
// Likewise: it would put back what parts of the promised step have changed, and commit the rest of the step.
constexpr uint32_t kCountsParts = 8;
// In format 2.
constexpr uint32_t kCountsInCopies = 16;
constexpr uint32_t kCountsBeside = kCountsWriting | kCountsParts | kCountsInCopies;

uint32_t TakeUpCrc(const RawTakeUpHeader& raw) { return RecordCrc(&raw, offsetof(RawTakeUpHeader, crc)); }

RawTakeUpHeader HeaderAt(const Slab& slab, int64_t place) {
  RawTakeUpHeader raw;
  std::memcpy(&raw, slab.At<char>(place * static_cast<int64_t>(sizeof(raw))), sizeof(raw));
  return raw;
}

bool HasMagic(const RawTakeUpHeader& raw) { return std::memcmp(raw.magic, kTakeUpMagic, sizeof(kTakeUpMagic)) == 0; }

// The header that counts; sequence 0: none is valid.
RawTakeUpHeader LastHeader(const Slab& slab) {
  RawTakeUpHeader last{};
  for (int64_t i = 0; i < 2; ++i) {
    const RawTakeUpHeader raw = HeaderAt(slab, i);
    if (HasMagic(raw) && kTakeUpFormats.Has(static_cast<int>(raw.format)) && raw.crc == TakeUpCrc(raw) &&
        raw.sequence > last.sequence) {
      last = raw;
    }
  }
  return last;
}

}  // namespace

int TakeUpLog::FormatFor(const ShardPlan& plan, const SlabPlace& place) {
  return place.memory == nullptr && SnapshotMayBeInCopies(plan) ? kInCopies : kOwnShards;
}

absl::StatusOr<std::unique_ptr<TakeUpLog>> TakeUpLog::Create(const Sizes& sizes, int format) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          Slab::Create(kTakeUpName, SlabBacking::kSealedMemfd, SizeBytes(sizes)));
  std::unique_ptr<TakeUpLog> log(new TakeUpLog(std::move(slab), sizes, format));
  log->Write();
  return log;
}

absl::StatusOr<std::unique_ptr<TakeUpLog>> TakeUpLog::TakeUp(UniqueFd fd, const Sizes& sizes) {
  int format = kTakeUpFormats.oldest;
  for (int64_t i = 0; i < 2; ++i) {
    // First: another format may have another size, and another checksum.
    const auto there = FormatAt(fd.get(), i * static_cast<int64_t>(sizeof(RawTakeUpHeader)), kTakeUpMagic);
    format = there.value_or(format);
    SHARDD_RETURN_IF_ERROR(CheckFormat(kTakeUpName, format, kTakeUpFormats));
  }
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::TakeUp(kTakeUpName, std::move(fd), SizeBytes(sizes)));
  std::unique_ptr<TakeUpLog> log(new TakeUpLog(std::move(slab), sizes, format));
  const RawTakeUpHeader last = LastHeader(*log->slab_);
  log->header_ = {last.epoch, last.step, last.version};
  log->sequence_ = last.sequence;
  log->facts_ = last.facts;
  log->writing_ = (last.counts & kCountsWriting) != 0;
  log->promised_parts_ = (last.counts & kCountsParts) != 0;
  log->shards_in_copies_ = log->said_in_copies_ = (last.counts & kCountsInCopies) != 0;
  const uint32_t counts = last.counts & ~kCountsBeside;
  log->behind_pass_ = counts == kCountsBehindPass;
  log->counts_ = log->behind_pass_ ? Counts::kSnapshotBeingTaken : static_cast<Counts>(counts);
  log->touched_ = (last.flags & kTouched) != 0;
  log->promised_ = (last.flags & kPromised) != 0         ? Promised::kStep
                   : (last.flags & kPromisedValues) != 0 ? Promised::kValues
                                                         : Promised::kNothing;
  log->finished_ = (last.flags & kFinished) != 0;
  log->second_ = (last.flags & kSecond) != 0;
  return log;
}

struct TakeUpLog::RawProcess {
  static constexpr uint32_t kNone = 0, kThis = 1, kUnknown = 2, kFinished = 3;
  std::atomic<uint32_t> state;
  int32_t pid;
  uint32_t uid;
  uint32_t zero;
  uint64_t start_ticks;
};

TakeUpLog::RawProcess* TakeUpLog::RawProcessOf(int rank) const {
  constexpr int64_t kProcessesAt = 2 * sizeof(RawTakeUpHeader);
  constexpr int64_t kMost = (kUpdatesAt - kProcessesAt) / static_cast<int64_t>(sizeof(RawProcess));
  return rank < kMost ? slab_->At<RawProcess>(kProcessesAt) + rank : nullptr;
}

void TakeUpLog::SetProcess(int rank, const Process& process) {
  RawProcess* const raw = RawProcessOf(rank);
  if (raw == nullptr) return;
  raw->state = RawProcess::kUnknown;
  raw->pid = process.pid;
  raw->uid = process.uid;
  raw->start_ticks = process.start_ticks;
  if (process.pid > 0 && process.start_ticks > 0) raw->state = RawProcess::kThis;
}

void TakeUpLog::ForgetProcess(int rank, bool finished) {
  RawProcess* const raw = RawProcessOf(rank);
  if (raw != nullptr) raw->state = finished ? RawProcess::kFinished : RawProcess::kNone;
}

bool TakeUpLog::finished(int rank) const {
  const RawProcess* const raw = RawProcessOf(rank);
  return finished_ || (raw != nullptr && raw->state == RawProcess::kFinished);
}

std::optional<TakeUpLog::Process> TakeUpLog::process(int rank) const {
  const RawProcess* const raw = RawProcessOf(rank);
  const uint32_t state = raw == nullptr ? RawProcess::kUnknown : raw->state.load();
  if (state == RawProcess::kNone || state == RawProcess::kFinished) return std::nullopt;
  return state == RawProcess::kThis ? Process{raw->pid, raw->uid, raw->start_ticks} : Process();
}

TakeUpLog::TakeUpLog(std::unique_ptr<Slab> slab, const Sizes& sizes, int format)
    : slab_(std::move(slab)), sizes_(sizes), format_(format) {}

TakeUpLog::~TakeUpLog() = default;

absl::Status TakeUpLog::PinFor(const SlabPlace& place) {
  SHARDD_ASSIGN_OR_RETURN(pinned_,
                          place.memory->RegisterHost(kTakeUpName, slab_->data(), slab_->size_bytes(), place.users));
  return absl::OkStatus();
}

void TakeUpLog::SetVersion(uint64_t epoch, uint64_t version) {
  header_.epoch = epoch;
  header_.version = version;
  promised_ = Promised::kNothing;
  Write();
}

void TakeUpLog::CommitStep(const Header& header) {
  header_ = header;
  facts_ = 0;
  counts_ = Counts::kShards;
  touched_ = behind_pass_ = shards_in_copies_ = false;
  promised_ = Promised::kNothing;
  Write();
}

absl::Status TakeUpLog::Promise(const v1::PromisedStepRecord& record) {
  SHARDD_RETURN_IF_ERROR(WriteRecord(PlaceOf(kPromisePlace), sizes_.place_bytes, record));
  promised_ = Promised::kStep;
  promised_parts_ = record.parts() > 0;
  Write();
  return absl::OkStatus();
}

absl::Status TakeUpLog::PromiseValues(const v1::PromisedValuesRecord& record) {
  SHARDD_RETURN_IF_ERROR(WriteRecord(PlaceOf(kPromisePlace), sizes_.place_bytes, record));
  promised_ = Promised::kValues;
  Write();
  return absl::OkStatus();
}

absl::Status TakeUpLog::Commit(const v1::CommittedRecord& facts, const Header& header, Counts counts, bool second) {
  const uint32_t place = facts_ == 1 ? 2 : 1;  // the header that counts means another one
  SHARDD_RETURN_IF_ERROR(WriteRecord(PlaceOf(place), sizes_.place_bytes, facts));
  header_ = header;
  facts_ = place;
  counts_ = counts;
  second_ = second;
  touched_ = behind_pass_ = false;
  shards_in_copies_ = shards_in_copies_ && counts == Counts::kSnapshot;
  if (!std::exchange(keeps_promise_, false)) promised_ = Promised::kNothing;
  Write();
  return absl::OkStatus();
}

void TakeUpLog::SnapshotTaken(bool shards_in_copies) {
  counts_ = Counts::kSnapshot;
  behind_pass_ = false;
  shards_in_copies_ = shards_in_copies;
  Write();
}

void TakeUpLog::SnapshotIsBehind() {
  behind_pass_ = true;
  Write();
}

void TakeUpLog::SetWriting(bool writing) {
  if (std::exchange(writing_, writing) != writing) Write();
}

void TakeUpLog::End() {
  header_ = {};
  facts_ = 0;
  counts_ = Counts::kShards;
  touched_ = finished_ = behind_pass_ = shards_in_copies_ = writing_ = second_ = false;
  promised_ = Promised::kNothing;
  Write();
}

void TakeUpLog::Finish() {
  finished_ = true;
  Write();
}

void TakeUpLog::Touch() {
  if (touched_) return;
  touched_ = true;
  Write();
}

// Whoever is killed in here leaves the header before.
void TakeUpLog::Write() {
  RawTakeUpHeader raw{};
  std::memcpy(raw.magic, kTakeUpMagic, sizeof(kTakeUpMagic));
  raw.format = static_cast<uint32_t>(format_);
  raw.sequence = ++sequence_;
  raw.epoch = header_.epoch;
  raw.step = header_.step;
  raw.version = header_.version;
  raw.facts = facts_;
  raw.flags = (touched_ ? kTouched : 0) | (promised_ == Promised::kStep ? kPromised : 0) |
              (promised_ == Promised::kValues ? kPromisedValues : 0) | (finished_ ? kFinished : 0) |
              (second_ ? kSecond : 0);
  raw.counts = (behind_pass_ ? kCountsBehindPass : static_cast<uint32_t>(counts_)) | (writing_ ? kCountsWriting : 0) |
               (shards_in_copies_ ? kCountsInCopies : 0) |
               (promised_ == Promised::kStep && promised_parts_ ? kCountsParts : 0);
  raw.crc = TakeUpCrc(raw);
  char* const place = slab_->At<char>(static_cast<int64_t>(sequence_ % 2) * static_cast<int64_t>(sizeof(raw)));
  constexpr size_t kHalf = sizeof(raw) / 2;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  AtKeptWrite();
  std::memcpy(place, &raw, kHalf);
  AtKeptWrite();
  std::memcpy(place + kHalf, reinterpret_cast<const char*>(&raw) + kHalf, sizeof(raw) - kHalf);
  AtKeptWrite();
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

absl::StatusOr<TakeUpLog::Left> TakeUpLog::Read() const {
  const RawTakeUpHeader best = LastHeader(*slab_);
  constexpr int64_t kMostSteps = int64_t{1} << 62;
  if (best.sequence == 0 || best.facts > 2 || best.step < 0 || best.step > kMostSteps) {
    return absl::DataLossError("take-up log: no header is valid");
  }
  if (constexpr uint32_t kMostCounts = kCountsBehindPass | kCountsBeside; best.counts > kMostCounts) {
    return absl::FailedPreconditionError(
        absl::StrCat("take-up log: this version of shardd does not know what counts there (got ", best.counts,
                     ", want at most ", kMostCounts, "); start a newer one"));
  }
  Left left;
  left.header = {best.epoch, best.step, best.version};
  left.touched = (best.flags & kTouched) != 0;
  left.finished = (best.flags & kFinished) != 0;
  left.second = (best.flags & kSecond) != 0;
  const uint32_t counts = best.counts & ~kCountsBeside;
  left.behind_pass = counts == kCountsBehindPass;
  left.shards_in_copies = (best.counts & kCountsInCopies) != 0;
  left.counts = left.behind_pass ? Counts::kSnapshotBeingTaken : static_cast<Counts>(counts);
  left.facts_in_journal = best.facts == 0;
  if (!left.facts_in_journal && !ReadRecord(PlaceOf(best.facts), sizes_.place_bytes, &left.facts)) {
    return absl::DataLossError("take-up log: what is committed is not valid");
  }
  if (sizes_.promises && (best.flags & kPromised) != 0 &&
      (!ReadRecord(PlaceOf(kPromisePlace), sizes_.place_bytes, &left.promised.emplace()) ||
       left.promised->step() != best.step + 1)) {
    return absl::DataLossError("take-up log: what is promised is not valid");
  }
  if (sizes_.promises && (best.flags & kPromisedValues) != 0 &&
      (!ReadRecord(PlaceOf(kPromisePlace), sizes_.place_bytes, &left.promised_values.emplace()) ||
       left.promised_values->version() != best.version + 1)) {
    return absl::DataLossError("take-up log: what values are promised is not valid");
  }
  return left;
}

}  // namespace shardd
