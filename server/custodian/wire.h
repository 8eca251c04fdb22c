#ifndef SHARDD_SERVER_CUSTODIAN_WIRE_H_
#define SHARDD_SERVER_CUSTODIAN_WIRE_H_

// The bytes between daemon and custodian, in native byte order because both are on one machine. A request has one
// answer, but for kList, which has one for each object and then kEnd. A custodian runs on while daemons are upgraded,
// so both say a range of versions (kCustodyVersions) with kOwn, and speak the newest one that both know. The size of a
// message, the fields up to `newest`, kOwn and its answer are the same in all versions.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "common/versions/versions.h"

namespace shardd {

enum class CustodyOp : uint16_t {
  kOwn = 1,   // the sender is the owner from here on. FAILED_PRECONDITION, with its pid: somebody else is.
              // UNIMPLEMENTED: no version in common
  kPut = 2,   // holds the descriptor as (job, name), in the place of what was there. RESOURCE_EXHAUSTED: it is full
  kDrop = 3,  // lets go of all that there is of the job
  kList = 4,  // all objects
  kAnswer = 100,
  kObject = 101,
  kEnd = 102,
};

// A whole message. Every byte is written.
struct CustodyMessage {
  char magic[4] = {'S', 'H', 'C', 'U'};
  uint16_t version = static_cast<uint16_t>(kCustodyVersions.oldest);  // of this message
  CustodyOp op = CustodyOp::kAnswer;
  int32_t code = 0;  // of an answer: absl::StatusCode
  // Of kOwn: the newest version that the daemon speaks, where `version` is the oldest. Of its answer: the version of
  // all messages from here on. 0: `version`.
  uint32_t newest = 0;
  uint64_t job = 0;     // 0: the daemon's own
  char name[48] = {};   // NUL-terminated
  char text[184] = {};  // of an answer that is an error; NUL-terminated

  void SetName(absl::string_view value);
  void SetText(absl::string_view value);
};
static_assert(sizeof(CustodyMessage) == 256);

// Names are 1 to 47 bytes of a-z, 0-9, space and '-'.
bool IsCustodyName(absl::string_view name);

// Sends the message with `fd` (-1: none). UNAVAILABLE: the other side is gone. DEADLINE_EXCEEDED: it does not read.
absl::Status SendCustody(int socket, const CustodyMessage& message, int fd, absl::Duration limit);
// UNAVAILABLE: the other side is gone. INVALID_ARGUMENT: it is no message; what came with it is closed. The caller
// checks its version. DEADLINE_EXCEEDED: nothing has come. RESOURCE_EXHAUSTED: this process has no descriptor left for
// what came with it.
absl::StatusOr<CustodyMessage> ReceiveCustody(int socket, UniqueFd* fd, absl::Duration limit);

}  // namespace shardd

#endif  // SHARDD_SERVER_CUSTODIAN_WIRE_H_
