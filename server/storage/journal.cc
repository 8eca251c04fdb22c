#include "server/storage/journal.h"

#include <zlib.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr char kMagic[4] = {'S', 'H', 'J', 'L'};
constexpr uint32_t kFormat = 1;

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

uint32_t Crc(const void* data, size_t size) {
  return static_cast<uint32_t>(crc32(0, static_cast<const Bytef*>(data), static_cast<uInt>(size)));
}

uint32_t HeaderCrc(const RawHeader& raw) { return Crc(&raw, offsetof(RawHeader, crc)); }

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Create(int64_t place_bytes) {
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                          Slab::Create("journal", SlabBacking::kSealedMemfd, kHeaderBytes + 2 * place_bytes));
  return std::unique_ptr<Journal>(new Journal(std::move(slab), place_bytes));
}

absl::Status Journal::WriteDecided(const v1::DecidedStepRecord& record) {
  std::string bytes(8, '\0');
  if (!record.AppendToString(&bytes) || static_cast<int64_t>(bytes.size()) > place_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("journal: record of step ", record.step(), " is too large (got ",
                                                     bytes.size(), ", want at most ", place_bytes_, " bytes)"));
  }
  const uint32_t length = static_cast<uint32_t>(bytes.size() - 8);
  const uint32_t crc = Crc(bytes.data() + 8, length);
  std::memcpy(bytes.data(), &length, 4);
  std::memcpy(bytes.data() + 4, &crc, 4);
  std::memcpy(slab_->At<char>(PlaceOf(record.step())), bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status Journal::WriteHeader(const Header& header) {
  RawHeader raw{};
  std::memcpy(raw.magic, kMagic, 4);
  raw.format = kFormat;
  raw.epoch = header.epoch;
  raw.committed_step = header.committed_step;
  raw.version = header.version;
  raw.crc = HeaderCrc(raw);
  std::memcpy(slab_->data(), &raw, sizeof(raw));
  return absl::OkStatus();
}

absl::StatusOr<Journal::Header> Journal::ReadHeader() const {
  RawHeader raw{};
  std::memcpy(&raw, slab_->data(), sizeof(raw));
  if (std::memcmp(raw.magic, kMagic, 4) != 0 || raw.format != kFormat || raw.crc != HeaderCrc(raw)) {
    return absl::DataLossError("journal: header is not valid");
  }
  return Header{raw.epoch, raw.committed_step, raw.version};
}

absl::StatusOr<v1::DecidedStepRecord> Journal::ReadDecided(int64_t step) const {
  const char* const place = slab_->At<char>(PlaceOf(step));
  uint32_t head[2] = {0, 0};
  std::memcpy(head, place, sizeof(head));
  v1::DecidedStepRecord record;
  if (head[0] > place_bytes_ - 8 || Crc(place + 8, head[0]) != head[1] ||
      !record.ParseFromArray(place + 8, static_cast<int>(head[0])) || record.step() != step) {
    return absl::NotFoundError(absl::StrCat("journal: no record of step ", step));
  }
  return record;
}

}  // namespace shardd
