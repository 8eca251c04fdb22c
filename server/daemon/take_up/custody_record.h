#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_CUSTODY_RECORD_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_CUSTODY_RECORD_H_

// Records that the custodian keeps, by name, beside a job's slabs.

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/slab.h"
#include "common/shm/unique_fd.h"
#include "google/protobuf/message_lite.h"
#include "server/custodian/custody.h"
#include "server/storage/job_memory.h"
#include "shardd/v1/custody.pb.h"

namespace shardd {

// Names of what a job has with the custodian beside its slabs, and its description (kCustodyJobName).
inline constexpr char kCustodyJournalName[] = "journal";
inline constexpr char kCustodyLogName[] = "take-up log";

// Memory that holds one record, and nothing else.
absl::StatusOr<std::unique_ptr<Slab>> MakeCustodyRecord(const char* name, const google::protobuf::MessageLite& record);
absl::Status ReadCustodyRecord(const char* name, UniqueFd fd, google::protobuf::MessageLite* record);
// Removes and returns it; invalid: there is none.
UniqueFd TakeKept(JobMemory::Kept& kept, const char* name);

// Which job it is, as far as its record says that. Leaves it as it is. Errors: as LeftJob::Read.
absl::StatusOr<v1::CustodyJob> ReadCustodyJob(const JobMemory::Kept& kept);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_CUSTODY_RECORD_H_
