#include "common/status/status_macros.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd {
namespace {

TEST(StatusMacrosTest, ReturnIfErrorReturnsTheErrorAndEvaluatesOnce) {
  int calls = 0;
  const auto run = [&](const absl::Status& status) -> absl::Status {
    SHARDD_RETURN_IF_ERROR((++calls, status));
    return absl::AlreadyExistsError("went on");
  };
  EXPECT_EQ(run(absl::AbortedError("rank 2 died")), absl::AbortedError("rank 2 died"));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(run(absl::OkStatus()), absl::AlreadyExistsError("went on"));
  EXPECT_EQ(calls, 2);
}

TEST(StatusMacrosTest, ReturnIfErrorIsOneStatementBehindIf) {
  const auto run = [](bool check) -> absl::Status {
    if (check)
      SHARDD_RETURN_IF_ERROR(absl::AbortedError("checked"));
    else
      return absl::InternalError("not checked");
    return absl::OkStatus();
  };
  EXPECT_EQ(run(true), absl::AbortedError("checked"));
  EXPECT_EQ(run(false), absl::InternalError("not checked"));
}

TEST(StatusMacrosTest, AssignOrReturnMovesTheValueOut) {
  const auto run = [](absl::StatusOr<std::unique_ptr<int>> source) -> absl::StatusOr<int> {
    SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, std::move(source));
    return *value;
  };
  EXPECT_EQ(run(std::make_unique<int>(7)).value(), 7);
  EXPECT_EQ(run(absl::NotFoundError("no such job")).status(), absl::NotFoundError("no such job"));
}

TEST(StatusMacrosTest, AssignOrReturnWorksTwiceAndOnExistingVariables) {
  const auto source = [](int value) -> absl::StatusOr<int> {
    if (value < 0) {
      return absl::OutOfRangeError("negative");
    }
    return value;
  };
  const auto sum = [&](int a, int b) -> absl::StatusOr<int> {
    SHARDD_ASSIGN_OR_RETURN(const int first, source(a));
    int second = 0;
    SHARDD_ASSIGN_OR_RETURN(second, source(b));
    return first + second;
  };
  EXPECT_EQ(sum(2, 3).value(), 5);
  EXPECT_EQ(sum(2, -3).status(), absl::OutOfRangeError("negative"));
}

}  // namespace
}  // namespace shardd
