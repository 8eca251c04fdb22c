#include "client/ctl/predict/step_program.h"

namespace shardd::ctl {
namespace {

constexpr double kFlopsPerElement = 2;    // a product and a sum for each token
constexpr double kBackwardOfForward = 2;  // gradients of inputs, and of parameters

class ProgramOfStep {
 public:
  ProgramOfStep(const ShardPlan& plan, const Machine& machine, const Load& load)
      : plan_(plan), machine_(machine), load_(load) {}

  std::vector<Instruction> Make() {
    for (int group = 0; group < count(); group = EndOf(group)) Forward(group);
    for (const int group : Siblings(0, count())) Backward(group);
    return std::move(program_);
  }

 private:
  int count() const { return static_cast<int>(plan_.groups.size()); }
  const GroupPlan& Of(int group) const { return plan_.groups[static_cast<size_t>(group)]; }
  // Behind the last group inside this one.
  int EndOf(int group) const {
    int end = group + 1;
    while (end < count() && Of(end).depth > Of(group).depth) ++end;
    return end;
  }
  // Those of [first, end) that are inside no other one of it, the last one first.
  std::vector<int> Siblings(int first, int end) const {
    std::vector<int> found;
    for (int group = first; group < end; group = EndOf(group)) found.insert(found.begin(), group);
    return found;
  }
  double ForwardSeconds(int group) const {
    const auto cost = machine_.groups.find(Of(group).name);
    if (cost != machine_.groups.end() && cost->second.forward_s >= 0) return cost->second.forward_s;
    double flops_per_token = 0;
    for (const int param : Of(group).params) {
      const ParamPlan& of_param = plan_.params[static_cast<size_t>(param)];
      if (of_param.shape.size() > 1) flops_per_token += kFlopsPerElement * static_cast<double>(of_param.numel);
    }
    if (cost != machine_.groups.end() && cost->second.forward_flops_per_token >= 0) {
      flops_per_token = cost->second.forward_flops_per_token;
    }
    return flops_per_token * load_.tokens / machine_.flops_per_s;
  }
  double BackwardSeconds(int group) const {
    const double again_s = load_.checkpointing && Of(group).depth > 0 ? ForwardSeconds(group) : 0;
    const auto cost = machine_.groups.find(Of(group).name);
    if (cost != machine_.groups.end() && cost->second.backward_s >= 0) return cost->second.backward_s + again_s;
    return kBackwardOfForward * ForwardSeconds(group) + again_s;
  }
  void Add(Instruction::Kind kind, int group, bool backward, double compute_s = 0) {
    program_.push_back({kind, group, backward, compute_s});
  }
  void Compute(int group, bool backward, bool inside, double seconds) {
    const bool has_inner = EndOf(group) > group + 1;
    if (has_inner || !inside) {
      Add(Instruction::Kind::kCompute, group, backward, has_inner ? seconds / 2 : seconds);
    }
  }
  void Forward(int group) {
    Add(Instruction::Kind::kUnshard, group, false);
    Compute(group, false, false, ForwardSeconds(group));
    for (int inner = group + 1; inner < EndOf(group); inner = EndOf(inner)) Forward(inner);
    Compute(group, false, true, ForwardSeconds(group));
    if (Of(group).reshard_after_forward) Add(Instruction::Kind::kReshard, group, false);
  }
  void Backward(int group) {
    if (Of(group).reshard_after_forward) Add(Instruction::Kind::kUnshard, group, true);
    Compute(group, true, false, BackwardSeconds(group));
    for (const int inner : Siblings(group + 1, EndOf(group))) Backward(inner);
    Compute(group, true, true, BackwardSeconds(group));
    if (Of(group).gradient_slot >= 0) Add(Instruction::Kind::kSubmitGradients, group, true);
    Add(Instruction::Kind::kReshard, group, true);
  }

  const ShardPlan& plan_;
  const Machine& machine_;
  const Load& load_;
  std::vector<Instruction> program_;
};

}  // namespace

std::vector<Instruction> StepProgram(const ShardPlan& plan, const Machine& machine, const Load& load) {
  return ProgramOfStep(plan, machine, load).Make();
}

}  // namespace shardd::ctl
