#include "client/c/attachment/staging.h"

#include <string.h>

#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int64_t kStagingAlignment = 64;

}  // namespace

void Staging::Reset() {
  record_ = half_record_[0] = half_record_[1] = 0;
  half_ = 0;
  half_used_bytes_ = 0;
}

void Staging::PutMessage(absl::string_view message) {
  message.copy(attachment_.memory().view().At<char>(attachment_.plan().layout().payload_offset_bytes), message.size());
}

void Staging::MessageSent() {
  record_ = half_record_[0] = half_record_[1] = attachment_.session().ring().submitted();
  half_used_bytes_ = 0;
}

absl::StatusOr<int64_t> Staging::PutElements(const void* data, int64_t size_bytes) {
  int64_t start = (half_used_bytes_ + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
  if (start + size_bytes > kHalfBytes) {
    half_ = 1 - half_;
    start = 0;
  }
  if (start == 0) {
    SHARDD_RETURN_IF_ERROR(
        attachment_.WaitConsumed(half_record_[half_], {"write_parameter", nullptr, "staging space"}));
  }
  half_used_bytes_ = start + size_bytes;
  const int64_t offset = attachment_.plan().layout().payload_offset_bytes + half_ * kHalfBytes + start;
  memcpy(attachment_.memory().view().At<char>(offset), data, static_cast<size_t>(size_bytes));
  return offset;
}

void Staging::ElementsSent() { record_ = half_record_[half_] = attachment_.session().ring().submitted(); }

}  // namespace shardd
