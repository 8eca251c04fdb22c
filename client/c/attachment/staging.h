#ifndef SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_
#define SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/c/attachment/attachment.h"
#include "common/plan/session_layout.h"

namespace shardd {

// Owns the payload area of the session's memory, through which records bring more than they can hold: one message at
// its beginning, or elements of parameters in two halves, one of which is filled while the daemon reads the other.
// Thread-compatible.
class Staging {
 public:
  static constexpr int64_t kHalfBytes = kStepPayloadBytes / 2;

  explicit Staging(Attachment& attachment) : attachment_(attachment) {}
  // As in a new session.
  void Reset();

  // Until the daemon has taken whatever lies there; then PutMessage, send its record, and Sent.
  absl::Status WaitTaken(const WaitFor& reason) { return attachment_.WaitConsumed(record_, reason); }
  // REQUIRES: at most kStepPayloadBytes.
  void PutMessage(absl::string_view message);
  void MessageSent();

  // Copies `size_bytes`, at most kHalfBytes, to where the offset that is returned is, in the session's memory. Waits
  // for a half that is free. Then send the record, and call ElementsSent.
  absl::StatusOr<int64_t> PutElements(const void* data, int64_t size_bytes);
  void ElementsSent();

 private:
  Attachment& attachment_;
  uint64_t record_ = 0;               // the last that uses the area
  uint64_t half_record_[2] = {0, 0};  // the same by half
  int half_ = 0;
  int64_t half_used_bytes_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_STAGING_H_
