#include "server/daemon/take_up/custody_record.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"
#include "server/storage/record_place.h"

namespace shardd {

absl::StatusOr<std::unique_ptr<Slab>> MakeCustodyRecord(const char* name, const google::protobuf::MessageLite& record) {
  const int64_t size_bytes = RecordBytes(record);
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::Create(name, SlabBacking::kSealedMemfd, size_bytes));
  SHARDD_RETURN_IF_ERROR(WriteRecord(slab->At<char>(0), size_bytes, record));
  return slab;
}

absl::Status ReadCustodyRecord(const char* name, UniqueFd fd, google::protobuf::MessageLite* record) {
  struct stat object {};
  if (fstat(fd.get(), &object) != 0) object.st_size = 0;
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, Slab::TakeUp(name, std::move(fd), object.st_size));
  return ReadRecord(slab->At<char>(0), slab->size_bytes(), record)
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat("\"", name, "\" is not valid"));
}

UniqueFd TakeKept(JobMemory::Kept& kept, const char* name) {
  const auto it = kept.find(name);
  return it == kept.end() ? UniqueFd() : std::move(kept.extract(it).mapped());
}

absl::StatusOr<v1::CustodyJob> ReadCustodyJob(const JobMemory::Kept& kept) {
  const auto record = kept.find(kCustodyJobName);
  if (record == kept.end()) return absl::NotFoundError("it was being opened");
  v1::CustodyJob job;
  SHARDD_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(kCustodyJobName, record->second.get()));
  SHARDD_RETURN_IF_ERROR(ReadCustodyRecord(kCustodyJobName, std::move(copy), &job));
  return job;
}

}  // namespace shardd
