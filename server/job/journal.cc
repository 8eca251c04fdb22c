#include "server/job/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/slab.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr char kMagic[4] = {'S', 'H', 'J', 'L'};
constexpr uint32_t kFormat = 1;
constexpr int64_t kHeaderBytes = 64;

struct RawHeader {
  char magic[4];
  uint32_t format;
  uint64_t epoch;
  int64_t committed_step;
  uint64_t version;
  uint32_t crc;
  char zero[28];
};
static_assert(sizeof(RawHeader) == kHeaderBytes);

uint32_t Crc(const void* data, size_t size) {
  return static_cast<uint32_t>(crc32(0, static_cast<const Bytef*>(data), static_cast<uInt>(size)));
}

uint32_t HeaderCrc(const RawHeader& raw) { return Crc(&raw, offsetof(RawHeader, crc)); }

absl::Status WriteAll(int fd, const void* data, size_t size, int64_t offset) {
  const ssize_t n = pwrite(fd, data, size, offset);
  if (n != static_cast<ssize_t>(size)) {
    return absl::ResourceExhaustedError(absl::StrCat("journal: write (got ", n, " of ", size, " bytes): ",
                                                     std::strerror(errno), "; free space in the state directory"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Create(const std::string& path, int64_t place_bytes) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) {
    return absl::InternalError(absl::StrCat("journal: open ", path, ": ", std::strerror(errno)));
  }
  // Allocated now: a decision must not fail for want of space.
  if (const int error = posix_fallocate(fd.get(), 0, kHeaderBytes + 2 * place_bytes); error != 0) {
    const std::string what = absl::StrCat("journal: allocate ", kHeaderBytes + 2 * place_bytes, " bytes at ", path,
                                          ": ", std::strerror(error));
    return absl::ResourceExhaustedError(absl::StrCat(what, "; ", FullStateDirRemedy()));
  }
  return std::unique_ptr<Journal>(new Journal(std::move(fd), place_bytes));
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(const std::string& path, int64_t place_bytes) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) {
    return absl::NotFoundError(absl::StrCat("journal: open ", path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<Journal> journal(new Journal(std::move(fd), place_bytes));
  SHARDD_RETURN_IF_ERROR(journal->ReadHeader().status());
  return journal;
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
  return WriteAll(fd_.get(), bytes.data(), bytes.size(), kHeaderBytes + (record.step() % 2) * place_bytes_);
}

absl::Status Journal::WriteHeader(const Header& header) {
  RawHeader raw{};
  std::memcpy(raw.magic, kMagic, 4);
  raw.format = kFormat;
  raw.epoch = header.epoch;
  raw.committed_step = header.committed_step;
  raw.version = header.version;
  raw.crc = HeaderCrc(raw);
  return WriteAll(fd_.get(), &raw, sizeof(raw), 0);
}

absl::StatusOr<Journal::Header> Journal::ReadHeader() const {
  RawHeader raw{};
  if (pread(fd_.get(), &raw, sizeof(raw), 0) != sizeof(raw) || std::memcmp(raw.magic, kMagic, 4) != 0 ||
      raw.format != kFormat || raw.crc != HeaderCrc(raw)) {
    return absl::DataLossError("journal: header is not valid");
  }
  return Header{raw.epoch, raw.committed_step, raw.version};
}

absl::StatusOr<v1::DecidedStepRecord> Journal::ReadDecided(int64_t step) const {
  const int64_t offset = kHeaderBytes + (step % 2) * place_bytes_;
  uint32_t head[2] = {0, 0};
  if (pread(fd_.get(), head, sizeof(head), offset) != sizeof(head) || head[0] > place_bytes_ - 8) {
    return absl::NotFoundError(absl::StrCat("journal: no record of step ", step));
  }
  std::string bytes(head[0], '\0');
  v1::DecidedStepRecord record;
  if (pread(fd_.get(), bytes.data(), bytes.size(), offset + 8) != static_cast<ssize_t>(bytes.size()) ||
      Crc(bytes.data(), bytes.size()) != head[1] || !record.ParseFromString(bytes) || record.step() != step) {
    return absl::NotFoundError(absl::StrCat("journal: no record of step ", step));
  }
  return record;
}

}  // namespace shardd
