#include "tests/faults/bad_input.h"

#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd::faults {

using e2e::TrainerReport;

void BadInput::StartDaemonWithJob(const std::vector<std::string>& flags, const e2e::Args& extra) {
  job_ = job_.With(extra);
  other_ = other_.With(extra);
  StartDaemon(flags);
  ExpectAllOk(RunRanks(job_.With({{"steps", "5"}, {"finish", "0"}, {"wait_step", "1"}})));
  ASSERT_EQ(Job().committed_step(), 5);
}

void BadInput::ExpectJobIntact() {
  ASSERT_TRUE(DaemonAlive());
  ASSERT_TRUE(testing::PollUntil([&] { return Job().attached_ranks() == 0; }));
  ASSERT_EQ(Job().committed_step(), 5);
  const std::vector<TrainerReport> reports = RunRanks(job_.With({{"steps", "8"}}));
  ExpectAllOk(reports);
  EXPECT_EQ(reports[0].Note("attached"), "attached 5");
  ExpectServesOthers();
  ExpectSame(reports, {Report(other_, 0)});
}

void BadInput::ExpectServesOthers() { ExpectAllOk(RunRanks(other_)); }

int64_t BadInput::ResidentBytes() const {
  std::ifstream status(absl::StrCat("/proc/", daemon_pid(), "/status"));
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, "VmRSS:")) return std::atoll(line.c_str() + 6) * 1024;
  }
  ADD_FAILURE() << "no VmRSS";
  return 0;
}

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), text)) << status << "\nwants: " << text;
}

void SetShape(v1::JobSpec& spec, std::initializer_list<int64_t> shape) {
  v1::Parameter& parameter = *spec.mutable_tree()->mutable_modules(0)->mutable_parameters(0);
  parameter.clear_shape();
  for (const int64_t extent : shape) parameter.add_shape(extent);
}

void AddParameters(v1::JobSpec& spec, int count) {
  for (int i = 0; i < count; ++i) {
    v1::Parameter& parameter = *spec.mutable_tree()->mutable_modules(0)->add_parameters();
    parameter.set_name(absl::StrCat("p", i));
    parameter.set_dtype(v1::DTYPE_FLOAT32);
  }
}

}  // namespace shardd::faults
