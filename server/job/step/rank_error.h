#ifndef SHARDD_SERVER_JOB_STEP_RANK_ERROR_H_
#define SHARDD_SERVER_JOB_STEP_RANK_ERROR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardd {

// An error of one rank in the running step, which is one behind the committed step: "WHAT: FACT (rank=R, step=S)".
inline absl::Status RankErrorAt(int64_t committed_step, absl::StatusCode code, int rank, absl::string_view what,
                                absl::string_view fact) {
  return absl::Status(code, absl::StrCat(what, ": ", fact, " (rank=", rank, ", step=", committed_step + 1, ")"));
}

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_RANK_ERROR_H_
