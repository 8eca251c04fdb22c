#include "server/storage/journal.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/process/kept_write.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"
#include "server/storage/record_place.h"

namespace shardd {
namespace {

constexpr char kMagic[4] = {'S', 'H', 'J', 'L'};

struct RawHeader {
  char magic[4];
  uint32_t format;
  uint64_t epoch;
  int64_t committed_step;
  uint64_t version;
  uint32_t crc;
  char zero[28];
};
static_assert(sizeof(RawHeader) == 64);

uint32_t HeaderCrc(const RawHeader& raw) { return RecordCrc(&raw, offsetof(RawHeader, crc)); }

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Create(int64_t place_bytes) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          Slab::Create("journal", SlabBacking::kSealedMemfd, kHeaderBytes + 2 * place_bytes));
  return std::unique_ptr<Journal>(new Journal(std::move(slab), place_bytes, kJournalFormats.newest));
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::TakeUp(UniqueFd fd, int64_t place_bytes) {
  // First: another format may have another size.
  const int format = FormatAt(fd.get(), /*offset_bytes=*/0, kMagic).value_or(kJournalFormats.oldest);
  SHARDD_RETURN_IF_ERROR(CheckFormat("journal", format, kJournalFormats));
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          Slab::TakeUp("journal", std::move(fd), kHeaderBytes + 2 * place_bytes));
  return std::unique_ptr<Journal>(new Journal(std::move(slab), place_bytes, format));
}

absl::Status Journal::WriteDecided(const v1::DecidedStepRecord& record) {
  const absl::Status status = WriteRecord(slab_->At<char>(PlaceOf(record.step())), place_bytes_, record);
  return status.ok() ? status
                     : absl::Status(status.code(),
                                    absl::StrCat("journal: record of step ", record.step(), ": ", status.message()));
}

absl::Status Journal::WriteHeader(const Header& header) {
  RawHeader raw{};
  std::memcpy(raw.magic, kMagic, 4);
  raw.format = static_cast<uint32_t>(format_);
  raw.epoch = header.epoch;
  raw.committed_step = header.committed_step;
  raw.version = header.version;
  raw.crc = HeaderCrc(raw);
  AtKeptWrite();
  std::memcpy(slab_->data(), &raw, sizeof(raw));
  AtKeptWrite();
  return absl::OkStatus();
}

void Journal::ForgetDecided() {
  for (const int64_t step : {0, 1}) {
    AtKeptWrite();
    std::memset(slab_->At<char>(PlaceOf(step)), 0, kRecordHeadBytes);
  }
  AtKeptWrite();
}

absl::StatusOr<Journal::Header> Journal::ReadHeader() const {
  RawHeader raw{};
  std::memcpy(&raw, slab_->data(), sizeof(raw));
  if (std::memcmp(raw.magic, kMagic, 4) != 0 || !kJournalFormats.Has(static_cast<int>(raw.format)) ||
      raw.crc != HeaderCrc(raw)) {
    return absl::DataLossError("journal: header is not valid");
  }
  return Header{raw.epoch, raw.committed_step, raw.version};
}

absl::StatusOr<v1::DecidedStepRecord> Journal::ReadDecided(int64_t step) const {
  v1::DecidedStepRecord record;
  if (!ReadRecord(slab_->At<char>(PlaceOf(step)), place_bytes_, &record) || record.step() != step) {
    return absl::NotFoundError(absl::StrCat("journal: no record of step ", step));
  }
  return record;
}

}  // namespace shardd
