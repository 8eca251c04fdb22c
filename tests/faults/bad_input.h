#ifndef SHARDD_TESTS_FAULTS_BAD_INPUT_H_
#define SHARDD_TESTS_FAULTS_BAD_INPUT_H_

// What clients may get wrong, by mistake or on purpose: each has a status with the right code, the job's committed
// state stays what it was, and the daemon lives and serves others.

#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/e2e/cluster.h"
#include "tests/faults/raw_client.h"

namespace shardd::faults {

class BadInput : public e2e::Cluster {
 protected:
  // A job of one rank with five committed steps, without sessions. `extra` adds to what the job is made of.
  void StartDaemonWithJob(const std::vector<std::string>& flags = {}, const e2e::Args& extra = {});
  // It is what it was: the three steps that follow end where an undisturbed run of eight ends, bit for bit.
  void ExpectJobIntact();
  void ExpectServesOthers();
  // What the daemon has in memory now.
  int64_t ResidentBytes() const;

  e2e::Args job_ = {{"world", "1"}};
  e2e::Args other_ = {{"world", "1"}, {"name", "bystander"}, {"steps", "8"}};
};

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text);

// Of the first parameter of the first module.
void SetShape(v1::JobSpec& spec, std::initializer_list<int64_t> shape);
// `count` scalars beside what the first module has.
void AddParameters(v1::JobSpec& spec, int count);

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_BAD_INPUT_H_
