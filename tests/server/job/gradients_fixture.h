#ifndef SHARDD_TESTS_SERVER_JOB_GRADIENTS_FIXTURE_H_
#define SHARDD_TESTS_SERVER_JOB_GRADIENTS_FIXTURE_H_

// Verbs for what ranks do with gradients: two groups of one parameter each under SGD, values begin at 0, lr is 1, so
// that after a step a value is minus the mean of what the ranks gave.

#include <algorithm>
#include <map>
#include <string>

#include "server/storage/job_slab.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {

class GradientsTest : public JobCoreTest {
 protected:
  static constexpr int kA = 1, kB = 2;  // groups; their parameters are 0 and 1
  static constexpr int kNumel = 64;     // of each; FLAT: the first half is rank 0's

  static SpecBuilder TwoGroups() {
    SpecBuilder builder(kRanks);
    builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    builder.Param(0, "root", {kNumel});
    for (const char* name : {"a", "b"}) {
      builder.Param(builder.AddSharded(0, name), "w", {kNumel});
    }
    return builder;
  }
  explicit GradientsTest(const SpecBuilder& builder = TwoGroups(), const MakeCollective& collective = nullptr)
      : JobCoreTest(builder, /*shared_copier=*/nullptr, {}, collective) {}

  void Unshard(int rank, int group, v1::Phase phase = v1::PHASE_BACKWARD) {
    v1::Command command;
    command.mutable_unshard()->set_group(group);
    command.mutable_unshard()->set_phase(phase);
    Send(rank, command);
  }
  void Reshard(int rank, int group) {
    v1::Command command;
    command.mutable_reshard()->set_group(group);
    Send(rank, command);
  }
  // Waits for the slot first, as a client does. `present`: the mask; empty: all.
  void Submit(int rank, int group, float value, bool fresh = false, const std::string& present = "") {
    AwaitAdded(rank, group);
    const int slot = plan_->groups[group].gradient_slot;
    OnLoop([&] {
      auto* numbers = reinterpret_cast<float*>(const_cast<char*>(job_->sessions()[rank].get()->slot(group)));
      std::fill(numbers, numbers + plan_->groups[group].gradient_bytes / sizeof(float), value);
    });
    ++submissions_[rank][slot];
    Unshard(rank, group);
    v1::Command command;
    command.mutable_submit_gradients()->set_group(group);
    if (fresh) {
      command.mutable_submit_gradients()->set_fresh(
          std::string(1, static_cast<char>((1 << plan_->groups[group].params.size()) - 1)));
    }
    command.mutable_submit_gradients()->set_present(present);
    Send(rank, command);
    Reshard(rank, group);
  }
  void Done(int rank) {
    v1::Command command;
    command.mutable_backward_done()->set_index(closed_[rank]++);
    Send(rank, command);
  }
  void Backward(int rank, float value, bool fresh = false) {
    Submit(rank, kB, value, fresh);
    Submit(rank, kA, value, fresh);
    Done(rank);
  }
  void Step(int rank, double weight_decay = 0, double max_grad_norm = 0) {
    v1::Command command;
    command.mutable_step()->add_groups()->set_lr(1);
    command.mutable_step()->mutable_groups(0)->set_weight_decay(weight_decay);
    command.mutable_step()->set_max_grad_norm(max_grad_norm);
    closed_[rank] = 0;
    Send(rank, command);
  }
  void StepAll(int64_t number, double weight_decay = 0, double max_grad_norm = 0) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Step(rank, weight_decay, max_grad_norm);
    }
    ASSERT_TRUE(Until([&] { return job_->view().committed_step() == number; })) << streams_[0]->Aborted().message();
  }
  void Abandon(int rank) {
    v1::Command command;
    command.mutable_abandon_backward();
    Send(rank, command);
  }
  void Say(int rank, int group, bool present) {
    v1::Command command;
    command.mutable_set_gradient_presence()->set_param(ParamOf(group));
    command.mutable_set_gradient_presence()->set_present(present);
    Send(rank, command);
  }
  // Until what the rank has submitted in the group's slot is added up.
  void AwaitAdded(int rank, int group) {
    const int slot = plan_->groups[group].gradient_slot;
    ASSERT_TRUE(Until([&] { return Word(rank, slot) >= submissions_[rank][slot]; })) << "rank " << rank;
  }
  v1::Counters Counters() {
    v1::Job job;
    OnLoop([&] { job_->view().Describe(&job).Complete(&job); });
    return job.counters();
  }
  uint64_t Word(int rank, int slot) {
    uint64_t result = 0;
    const auto read = [&] {
      if (Session* session = job_->sessions()[rank].get(); session != nullptr) {
        const DaemonPageView page(session->memory()->daemon_page->data(),
                                  static_cast<int64_t>(plan_->gradient_slots.size()),
                                  static_cast<int64_t>(plan_->groups.size()));
        result = TimelineSequence(page.slot(slot).released.load());
      }
    };
    loop_.InLoop() ? read() : OnLoop(read);
    return result;
  }
  int ParamOf(int group) const { return plan_->groups[group].params[0]; }
  float* Shard(int group) { return At(memory().shards()->At(0), group, &FlatParamPlan::shards_offset_bytes); }
  float* Gradient(int group) {
    return At(memory().pointers().gradients, group, &FlatParamPlan::gradients_offset_bytes);
  }
  float First(int group) { return Shard(group)[0]; }          // rank 0's
  float Last(int group) { return Shard(group)[kNumel - 1]; }  // rank 1's
  bool Alive() { return streams_[0]->Count(v1::SessionEvent::kAborted) == 0; }
  std::string Error() { return streams_[0]->Aborted().message(); }
  const JobMemory& memory() { return job_->memory(); }

 private:
  float* At(char* slab, int group, int64_t FlatParamPlan::*offset) {
    const ParamPlan& param = plan_->params[ParamOf(group)];
    return reinterpret_cast<float*>(slab + plan_->flat_params[param.flat_param].*offset) + param.offset;
  }
  std::map<int, uint64_t> submissions_[kRanks];  // by slot
  int closed_[kRanks] = {};
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_GRADIENTS_FIXTURE_H_
