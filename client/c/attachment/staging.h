#ifndef SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_
#define SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "common/plan/session_layout.h"

namespace shardd {

// Owns the payload area of the session's memory, which holds what does not fit into a record: either one message at its
// beginning, or elements of parameters in two halves, of which one is filled while the daemon reads the other.
// Thread-compatible.
class Staging {
 public:
  static constexpr int64_t kHalfBytes = kStepPayloadBytes / 2;

  explicit Staging(Attachment& attachment) : attachment_(attachment) {}
  // Begins a new session.
  void Reset();

  // Waits until the daemon has read what the area holds. Next: PutMessage, send its record, MessageSent.
  absl::Status WaitTaken(const WaitFor& reason) { return attachment_.WaitConsumed(record_, reason); }
  // REQUIRES: `message` has at most kStepPayloadBytes.
  void PutMessage(absl::string_view message);
  void MessageSent();

  // Copies `size_bytes` (at most kHalfBytes) and returns their offset in the session's memory. Waits for a free half.
  // Next: send the record, ElementsSent.
  absl::StatusOr<int64_t> PutElements(const void* data, int64_t size_bytes);
  void ElementsSent();

 private:
  Attachment& attachment_;
  uint64_t record_ = 0;               // the last one that uses the area
  uint64_t half_record_[2] = {0, 0};  // the same by half
  int half_ = 0;
  int64_t half_used_bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_
