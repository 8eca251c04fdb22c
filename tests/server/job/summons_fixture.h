#ifndef SHARDD_TESTS_SERVER_JOB_SUMMONS_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_SUMMONS_FIXTURE_H_

#include <vector>

#include "server/device/device.h"
#include "server/job/full_params/summons.h"
#include "server/job/job_events.h"
#include "server/job/work/given_back.h"
#include "server/job/writes/write_undo.h"
#include "server/observe/events.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {

// With what gives ranks full parameters, and what that needs.
class SummonsFactsTest : public FactsTest {
 protected:
  v1::JobSpec spec_;
  EventLog log_;
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  PollTimer timer_{&loop_};
  GivenBack given_back_{&sessions_, &timer_, &loop_};
  WriteUndo undo_;
  std::vector<Device*> devices_;
  absl::Status undo_fits_;
  Summons summons_{
      {&spec_, plan_.get(), /*over_nodes=*/false, &committed_, &decision_, &sessions_, &pairing_, &writes_,
       &extensions_, &leavers_, &undo_},
      {&devices_, &given_back_, &work_, &events_, [] { return DeviceOps(2); }, [this] { return undo_fits_; }, &job_}};
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_SUMMONS_FIXTURE_H_
