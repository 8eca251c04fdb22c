#ifndef SHARDD_COMMON_STATUS_STATUS_MACROS_H_
#define SHARDD_COMMON_STATUS_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Debian 12's Abseil (20220623) has neither macro; only this file defines them.
#define SHARDD_RETURN_IF_ERROR(expr)                                  \
  do {                                                                \
    if (absl::Status shardd_status_ = (expr); !shardd_status_.ok()) { \
      return shardd_status_;                                          \
    }                                                                 \
  } while (false)

#define SHARDD_CONCAT_INNER_(a, b) a##b
#define SHARDD_CONCAT_(a, b) SHARDD_CONCAT_INNER_(a, b)

// SHARDD_ASSIGN_OR_RETURN(auto x, F()): `lhs` must not contain a comma outside parentheses.
#define SHARDD_ASSIGN_OR_RETURN(lhs, expr) \
  SHARDD_ASSIGN_OR_RETURN_(SHARDD_CONCAT_(shardd_statusor_, __LINE__), lhs, expr)
#define SHARDD_ASSIGN_OR_RETURN_(statusor, lhs, expr) \
  auto statusor = (expr);                             \
  if (!statusor.ok()) {                               \
    return std::move(statusor).status();              \
  }                                                   \
  lhs = *std::move(statusor)

#endif  // SHARDD_COMMON_STATUS_STATUS_MACROS_H_
