#ifndef SHARDD_CLIENT_C_API_API_INTERNAL_H_
#define SHARDD_CLIENT_C_API_API_INTERNAL_H_

// What the parts of the C ABI share: the structs behind its handles, and checks of what a C caller can get wrong (NULL,
// indices, struct sizes, fork).
//
//   api.cc           status, attach to detach, interrupts
//   api_describe.cc  what job, groups and parameters are, and how it goes
//   api_commands.cc  values, the hot path, steps, passes, full parameters

#include <string.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/c/host/process.h"
#include "client/c/job/client_job.h"
#include "client/c/shardd.h"
#include "common/status/status_macros.h"

struct shardd_status {
  int code;
  std::string message;
};

struct shardd_job {
  std::unique_ptr<shardd::ClientJob> impl;
  std::vector<std::vector<const char*>> aliases;  // by parameter
};

namespace shardd::api {

static_assert(std::is_same_v<int, int32_t>, "plan indices are handed out as int32_t");
static_assert(static_cast<int>(SHARDD_BOOL) == static_cast<int>(v1::DTYPE_BOOL));
static_assert(static_cast<int>(SHARDD_FLOAT32) == static_cast<int>(v1::DTYPE_FLOAT32));
static_assert(static_cast<int>(SHARDD_FORWARD) == static_cast<int>(v1::PHASE_FORWARD));
static_assert(static_cast<int>(SHARDD_BACKWARD) == static_cast<int>(v1::PHASE_BACKWARD));

inline shardd_status* ToC(const absl::Status& status) {
  if (status.ok()) {
    return nullptr;
  }
  return new shardd_status{static_cast<int>(status.raw_code()), std::string(status.message())};
}

inline absl::Status CheckNotNull(const char* call, const char* name, const void* pointer) {
  return pointer != nullptr ? absl::OkStatus()
                            : absl::InvalidArgumentError(absl::StrCat(call, ": `", name, "` is NULL"));
}

// 0: the default.
inline absl::StatusOr<absl::Duration> TimeoutOf(const char* call, int64_t timeout_ms) {
  constexpr int64_t kDefaultTimeoutMs = 300'000;
  if (timeout_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(call, ": timeout_ms is out of range (got ", timeout_ms, ", want 0 or more)"));
  }
  return absl::Milliseconds(timeout_ms == 0 ? kDefaultTimeoutMs : timeout_ms);
}

// On GPUs, and the host has its state.
inline bool IsOffloaded(const Attachment& attachment) {
  return attachment.memory().on_device() && attachment.plan().plan().config.offload() == v1::OFFLOAD_HOST;
}

inline absl::Status CheckJob(const char* call, const shardd_job* job) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull(call, "job", job));
  return CheckNotForked(call);
}

inline absl::Status CheckIndex(const char* call, const char* what, int32_t index, size_t count) {
  if (index >= 0 && static_cast<size_t>(index) < count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(call, ": ", what, " index is out of range (got ", index, ", want 0 to ", count - 1, ")"));
}

inline absl::Status CheckGroup(const char* call, const shardd_job* job, int32_t group) {
  SHARDD_RETURN_IF_ERROR(CheckJob(call, job));
  return CheckIndex(call, "group", group, job->impl->plan().groups.size());
}

inline absl::Status CheckParam(const char* call, const shardd_job* job, int32_t param) {
  SHARDD_RETURN_IF_ERROR(CheckJob(call, job));
  return CheckIndex(call, "parameter", param, job->impl->plan().params.size());
}

// Structs begin with their size, so that later versions can append fields; a caller that knows fewer is refused.
template <typename Struct>
inline absl::Status CheckStruct(const char* call, const Struct* given) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull(call, "struct", given));
  if (given->struct_size < sizeof(Struct)) {
    return absl::InvalidArgumentError(absl::StrCat(call, ": struct_size is too small (got ", given->struct_size,
                                                   ", want ", sizeof(Struct), "); set it to sizeof the struct"));
  }
  return absl::OkStatus();
}

// Fills what this version knows and zeroes what a newer caller has beyond it.
template <typename Struct>
void Fill(Struct* target, Struct value) {
  const size_t size = target->struct_size;
  value.struct_size = size;
  memcpy(target, &value, sizeof(Struct));
  if (size > sizeof(Struct)) {
    memset(reinterpret_cast<char*>(target) + sizeof(Struct), 0, size - sizeof(Struct));
  }
}

// For calls that answer without a status.
inline bool IsUsable(const shardd_job* job) { return job != nullptr && !IsForkedChild(); }
inline bool ParamIsUsable(const shardd_job* job, int32_t param) {
  return IsUsable(job) && param >= 0 && static_cast<size_t>(param) < job->impl->plan().params.size();
}

}  // namespace shardd::api

// Runs `expression`, a Status, if `check` passes.
#define SHARDD_CHECKED(check, expression)                \
  do {                                                   \
    if (absl::Status checked = (check); !checked.ok()) { \
      return shardd::api::ToC(checked);                  \
    }                                                    \
    return shardd::api::ToC(expression);                 \
  } while (false)

#endif  // SHARDD_CLIENT_C_API_API_INTERNAL_H_
