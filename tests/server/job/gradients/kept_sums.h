#ifndef SHARDD_TESTS_SERVER_JOB_GRADIENTS_KEPT_SUMS_H_
#define SHARDD_TESTS_SERVER_JOB_GRADIENTS_KEPT_SUMS_H_

// What adds gradients needs beside the facts, with a collective that keeps what it is asked to add.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/job/gradients/reductions.h"
#include "server/job/trace/job_trace.h"
#include "server/storage/job_memory.h"
#include "tests/server/job/facts_fixture.h"

namespace shardd {

class Device;

class KeptSums final : public Collective {
 public:
  const char* name() const override { return "kept"; }
  std::string Describe() const override { return "kept"; }
  void ReduceScatter(ReduceScatterRequest request, Done done) override {
    requests.push_back(std::move(request));
    ends.push_back(std::move(done));
  }
  void AllGather(AllGatherRequest, Done) override { FAIL() << "nobody gathers"; }
  std::vector<ReduceScatterRequest> requests;
  std::vector<Done> ends;
};

class KeptSumsTest : public FactsTest {
 protected:
  KeptSumsTest() {
    auto memory = JobMemory::Create(*plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    Attach(0);
    Attach(1);
  }
  Reductions::Facts SeenByReductions() const {
    return {&committed_, &sessions_, &steps_, &writes_, memory_.get(), &devices_};
  }
  Reductions::Services UsedByReductions() {
    return {&sums_, &given_back_, &timer_, &work_, &trace_, &counters_, &loop_, &job_};
  }
  void EndSum(size_t number, const absl::Status& status = absl::OkStatus()) {
    sums_.ends[number](status);
    loop_.RunAndWait([] {});
  }
  static std::vector<int> RanksOf(const ReduceScatterRequest& request) {
    std::vector<int> ranks;
    for (const GradientSource& source : request.sources) ranks.push_back(source.rank);
    return ranks;
  }

  std::unique_ptr<JobMemory> memory_;
  std::vector<Device*> devices_;  // no gradient is settled, so none is used
  PollTimer timer_{&loop_};
  GivenBack given_back_{&sessions_, &timer_, &loop_};
  JobTrace trace_{{"job", plan_, &devices_, &sessions_, &committed_, /*memory=*/nullptr, nullptr},
                  /*measured=*/nullptr,
                  &work_};
  v1::Counters counters_;
  KeptSums sums_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_GRADIENTS_KEPT_SUMS_H_
