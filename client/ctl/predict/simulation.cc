#include "client/ctl/predict/simulation.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ctl/predict/links.h"
#include "common/schedule/pooled_unshards.h"
#include "common/schedule/request_orders.h"
#include "common/status/status_macros.h"

namespace shardd::ctl {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The rank's device, its program and the node's pool. Events happen in the order of their time; whatever may begin at a
// moment begins then.
class Simulation {
 public:
  Simulation(std::shared_ptr<const ShardPlan> plan, const Fleet& fleet, const Machine& machine, const Load& load)
      : plan_(std::move(plan)),
        fleet_(fleet),
        machine_(machine),
        program_(StepProgram(*plan_, machine, load)),
        orders_(plan_),
        unshards_(plan_) {
    for (int rank = 0; rank < plan_->world_size; ++rank) {
      if (!unshards_.pooled() || unshards_.pool_of(rank) == 0) ranks_.push_back(rank);  // those that share a pool
    }
  }

  absl::StatusOr<Prediction> Step() {
    const double begin_s = now_s_;
    prediction_ = Prediction();
    prediction_.exposed_unshard_of_group_s.resize(plan_->groups.size());
    next_ = 0;
    host_free_s_ = now_s_;
    reduced_in_slot_.assign(plan_->gradient_slots.size(), 0);
    for (;;) {
      SHARDD_RETURN_IF_ERROR(BeginWhatMayBegin());
      if (Ended()) break;
      SHARDD_RETURN_IF_ERROR(Advance());
    }
    Update();
    CommitStep();
    prediction_.step_s = now_s_ - begin_s;
    for (Span& span : prediction_.spans) {
      span.begin_s -= begin_s;
      span.end_s -= begin_s;
    }
    return std::move(prediction_);
  }

 private:
  struct Computation {
    uint64_t id = 0;
    Instruction instruction;
    uint64_t behind_reduction = 0;                    // it writes into the gradient slot from which that one reads
    std::optional<std::pair<int, uint64_t>> request;  // group, asked so often: must be there
  };
  struct Fill {
    PoolFill fill;
    uint64_t behind_computation = 0;  // reads what lies in the slot
  };
  struct Reduction {
    uint64_t id = 0;
    int group = 0;
    uint64_t behind_computation = 0;
  };

  bool Ended() const {
    return next_ == program_.size() && computations_.empty() && reductions_.empty() && fills_.empty();
  }

  absl::Status BeginWhatMayBegin() {
    SHARDD_RETURN_IF_ERROR(RunProgram());
    if (!compute_left_s_.has_value() && !computations_.empty() && MayCompute(computations_.front())) {
      compute_begin_s_ = now_s_;
      compute_left_s_ = computations_.front().instruction.compute_s;
    }
    if (!gather_.has_value() && !fills_.empty() && fills_.front().behind_computation <= computed_) {
      const Traffic traffic = GatherTraffic(*plan_, fleet_, fills_.front().fill.group);
      Begin(traffic, &gather_, &gather_begin_s_);
      ++prediction_.unshards;
    }
    if (!reduction_.has_value() && !reductions_.empty() && reductions_.front().behind_computation <= computed_) {
      Begin(ReductionTraffic(*plan_, fleet_, reductions_.front().group), &reduction_, &reduction_begin_s_);
    }
    return absl::OkStatus();
  }

  void Begin(const Traffic& traffic, std::optional<Transfer>* transfer, double* begin_s) {
    transfer->emplace(machine_, fleet_, traffic);
    *begin_s = now_s_;
    prediction_.traffic.node_link_bytes += traffic.node_link_bytes;
    prediction_.traffic.device_link_bytes += traffic.device_link_bytes;
    prediction_.traffic.memory_bytes += traffic.memory_bytes;
  }

  bool IsThere(const Computation& computation) const {
    if (!computation.request.has_value()) return true;
    const auto there = there_.find(computation.request->first);
    return there != there_.end() && there->second >= computation.request->second;
  }
  bool MayCompute(const Computation& computation) const {
    return IsThere(computation) && computation.behind_reduction <= reduced_;
  }

  // The program runs until it has to wait: for a slot, for its own computation (on CPUs), or for time to pass.
  absl::Status RunProgram() {
    while (next_ < program_.size() && host_free_s_ <= now_s_ + kMoment) {
      if (!machine_.gpus && !computations_.empty()) return absl::OkStatus();
      SHARDD_RETURN_IF_ERROR(GrantAll());
      if (Waits()) return absl::OkStatus();
      SHARDD_RETURN_IF_ERROR(Do(program_[next_++]));
    }
    return GrantAll();
  }

  absl::Status Do(const Instruction& instruction) {
    const int group = instruction.group;
    switch (instruction.kind) {
      case Instruction::Kind::kUnshard: {
        host_free_s_ = now_s_ + machine_.request_s;
        const OrderEntry::Kind kind =
            instruction.backward ? OrderEntry::Kind::kUnshardBackward : OrderEntry::Kind::kUnshardForward;
        for (const int rank : ranks_) {
          (void)orders_.Observe(rank, {kind, group});
          if (!unshards_.pooled()) continue;
          unshards_.Ask(rank, group);
          SHARDD_RETURN_IF_ERROR(Grant(rank));
          if (!unshards_.Waits(rank)) PrefetchBehind(rank, kind);
        }
        return absl::OkStatus();
      }
      case Instruction::Kind::kCompute: {
        Computation computation;
        computation.id = ++issued_computations_;
        computation.instruction = instruction;
        if (const auto asked = asked_.find(group); asked != asked_.end()) computation.request = *asked;
        const int slot = plan_->groups[static_cast<size_t>(group)].gradient_slot;
        if (instruction.backward && slot >= 0) {
          computation.behind_reduction = reduced_in_slot_[static_cast<size_t>(slot)];
        }
        computations_.push_back(computation);
        return absl::OkStatus();
      }
      case Instruction::Kind::kSubmitGradients: {
        const int slot = plan_->groups[static_cast<size_t>(group)].gradient_slot;
        reductions_.push_back({++issued_reductions_, group, issued_computations_});
        reduced_in_slot_[static_cast<size_t>(slot)] = issued_reductions_;
        for (const int rank : ranks_) {
          (void)orders_.Observe(rank, {OrderEntry::Kind::kSubmitGradients, group});
          if (unshards_.pooled()) PrefetchBehind(rank, OrderEntry::Kind::kSubmitGradients);
        }
        return absl::OkStatus();
      }
      case Instruction::Kind::kReshard:
        for (const int rank : ranks_) unshards_.Reshard(rank, group, machine_.gpus ? issued_computations_ : 0);
        return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  bool Waits() const {
    return unshards_.pooled() &&
           std::any_of(ranks_.begin(), ranks_.end(), [this](int rank) { return unshards_.Waits(rank); });
  }
  absl::Status GrantAll() {
    if (!unshards_.MayRetry()) return absl::OkStatus();
    (void)unshards_.TakeRetries();
    for (const int rank : ranks_) SHARDD_RETURN_IF_ERROR(Grant(rank));
    return absl::OkStatus();
  }
  absl::Status Grant(int rank) {
    for (;;) {
      SHARDD_ASSIGN_OR_RETURN(const std::optional<PooledUnshards::Grant> grant, unshards_.GrantNext(rank));
      if (!grant.has_value()) return absl::OkStatus();
      asked_[grant->group] = grant->asked;
      if (grant->there) there_[grant->group] = grant->asked;
      if (grant->fill.has_value()) Enqueue(*grant->fill);
    }
  }
  void PrefetchBehind(int rank, OrderEntry::Kind request) {
    const std::optional<OrderEntry::Kind> kind = PrefetchedBehind(request, plan_->config);
    const std::optional<int32_t> next = kind.has_value() ? orders_.NextUnshard(rank, *kind) : std::nullopt;
    if (!next.has_value()) return;
    const PooledUnshards::Prefetched prefetched = unshards_.Prefetch(rank, *next);
    if (!prefetched.fill.has_value()) return;
    ++prediction_.prefetched;
    Enqueue(*prefetched.fill);
  }
  void Enqueue(const PoolFill& fill) {
    uint64_t behind = 0;
    for (const auto& [rank, done] : unshards_.ReadersBefore(fill)) behind = std::max(behind, done);
    fills_.push_back({fill, behind});
  }

  // Links are shared by what is in the same phase at a time, cores by all that runs.
  double ShareOf(const std::optional<Transfer>& transfer, const std::optional<Transfer>& other) const {
    if (transfer->phase() == 0) return 1;
    if (machine_.shares_cores) return 1 / Running();
    return other.has_value() && other->phase() == transfer->phase() ? 0.5 : 1;
  }
  double ComputeShare() const { return machine_.shares_cores ? 1 / Running() : 1; }
  double Running() const {
    double running = compute_left_s_.has_value() ? 1 : 0;
    for (const std::optional<Transfer>* transfer : {&gather_, &reduction_}) {
      if (transfer->has_value() && (*transfer)->phase() > 0) ++running;
    }
    return running;
  }

  absl::Status Advance() {
    double step_s = kNever;
    if (gather_.has_value()) step_s = gather_->left_s() / ShareOf(gather_, reduction_);
    if (reduction_.has_value()) step_s = std::min(step_s, reduction_->left_s() / ShareOf(reduction_, gather_));
    if (compute_left_s_.has_value()) step_s = std::min(step_s, *compute_left_s_ / ComputeShare());
    if (next_ < program_.size() && host_free_s_ > now_s_ + kMoment) step_s = std::min(step_s, host_free_s_ - now_s_);
    if (step_s == kNever) {
      return absl::InternalError(absl::StrCat("the step stands still at instruction ", next_, " of ", program_.size(),
                                              ", with ", computations_.size(), " computations, ", fills_.size(),
                                              " gathers and ", reductions_.size(), " reductions left"));
    }
    Account(step_s);
    const double gathered_s = gather_.has_value() ? step_s * ShareOf(gather_, reduction_) : 0;
    const double reduced_s = reduction_.has_value() ? step_s * ShareOf(reduction_, gather_) : 0;
    if (compute_left_s_.has_value()) *compute_left_s_ -= step_s * ComputeShare();
    now_s_ += step_s;
    if (compute_left_s_.has_value() && *compute_left_s_ <= kMoment) EndComputation();
    if (gather_.has_value()) {
      gather_->Advance(gathered_s);
      if (gather_->ended()) EndFill();
    }
    if (reduction_.has_value()) {
      reduction_->Advance(reduced_s);
      if (reduction_->ended()) EndReduction();
    }
    return absl::OkStatus();
  }

  // To what the rank's device owes the time to come.
  void Account(double step_s) {
    if (compute_left_s_.has_value()) {
      prediction_.compute_s += step_s;
    } else if (!computations_.empty() ? !IsThere(computations_.front()) : Waits()) {
      prediction_.exposed_unshard_s += step_s;
      const int group = !computations_.empty() ? computations_.front().instruction.group : fills_.front().fill.group;
      prediction_.exposed_unshard_of_group_s[static_cast<size_t>(group)] += step_s;
    } else if (!computations_.empty() || next_ == program_.size()) {
      prediction_.exposed_reduction_s += step_s;
    } else {
      prediction_.rest_s += step_s;
    }
  }

  void EndComputation() {
    const Instruction& instruction = computations_.front().instruction;
    computed_ = computations_.front().id;
    prediction_.spans.push_back({instruction.backward ? Span::What::kBackward : Span::What::kForward, instruction.group,
                                 compute_begin_s_, now_s_});
    compute_left_s_.reset();
    computations_.pop_front();
  }
  void EndFill() {
    const PoolFill fill = fills_.front().fill;
    fills_.pop_front();
    gather_.reset();
    prediction_.spans.push_back({Span::What::kUnshard, fill.group, gather_begin_s_, now_s_});
    for (const PooledUnshards::There& there : unshards_.Filled(fill)) there_[there.group] = there.asked;
  }
  void EndReduction() {
    prediction_.spans.push_back({Span::What::kReduce, reductions_.front().group, reduction_begin_s_, now_s_});
    reduced_ = reductions_.front().id;
    reductions_.pop_front();
    reduction_.reset();
  }

  void Update() {
    prediction_.update_s = UpdateBytes(*plan_, fleet_) / machine_.memory_bytes_per_s;
    prediction_.spans.push_back({Span::What::kUpdate, -1, now_s_, now_s_ + prediction_.update_s});
    now_s_ += prediction_.update_s + machine_.step_s;
    prediction_.rest_s += machine_.step_s;
  }
  void CommitStep() {
    for (const int rank : ranks_) {
      orders_.CloseBackward(rank);
      orders_.EndStep(rank);
    }
    orders_.StepCommitted();
    unshards_.NewVersion();
    asked_.clear();
    there_.clear();
  }

  static constexpr double kMoment = 1e-12;

  const std::shared_ptr<const ShardPlan> plan_;
  const Fleet fleet_;
  const Machine& machine_;
  const std::vector<Instruction> program_;
  RequestOrders orders_;
  PooledUnshards unshards_;
  std::vector<int> ranks_;
  double now_s_ = 0;
  Prediction prediction_;

  size_t next_ = 0;                // instruction of the program
  double host_free_s_ = 0;         // it goes on
  std::map<int, uint64_t> asked_;  // by group: so often the last grant had been asked for
  std::map<int, uint64_t> there_;  // by group: requests up to this one may be read

  std::deque<Computation> computations_;  // issued, in order
  std::optional<double> compute_left_s_;  // of the first one, which runs
  double compute_begin_s_ = 0;
  uint64_t issued_computations_ = 0;
  uint64_t computed_ = 0;

  std::deque<Fill> fills_;  // as computations
  std::optional<Transfer> gather_;
  double gather_begin_s_ = 0;

  std::deque<Reduction> reductions_;
  std::optional<Transfer> reduction_;
  double reduction_begin_s_ = 0;
  uint64_t issued_reductions_ = 0;
  uint64_t reduced_ = 0;
  std::vector<uint64_t> reduced_in_slot_;  // by gradient slot: the last reduction that reads it
};

}  // namespace

absl::StatusOr<Prediction> Predict(const std::shared_ptr<const ShardPlan>& plan, const Fleet& fleet,
                                   const Machine& machine, const Load& load) {
  Simulation simulation(plan, fleet, machine, load);
  SHARDD_RETURN_IF_ERROR(simulation.Step().status());
  return simulation.Step();
}

}  // namespace shardd::ctl
