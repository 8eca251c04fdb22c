#ifndef SHARDD_TESTS_SERVER_JOB_FAKE_JOB_H_
#define SHARDD_TESTS_SERVER_JOB_FAKE_JOB_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/job/job_part.h"

namespace shardd {

// A job that notes what its components ask of it, and ends nothing.
class FakeJob final : public JobControl {
 public:
  void Fail(absl::Status cause) override {
    failed.push_back(std::move(cause));
    if (when_failed) when_failed();
  }
  void Close(const std::string& why) override { closed.push_back(why); }
  void Advance() override { ++advanced; }
  std::shared_ptr<void> Keep() override { return alive; }

  // OK: nothing has failed.
  absl::Status failure() const { return failed.empty() ? absl::OkStatus() : failed.back(); }
  // Empty: the job was not closed.
  std::string why_closed() const { return closed.empty() ? "" : closed.back(); }

  std::vector<absl::Status> failed;
  std::vector<std::string> closed;  // why
  int advanced = 0;
  std::shared_ptr<int> alive = std::make_shared<int>(0);
  std::function<void()> when_failed;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_FAKE_JOB_H_
