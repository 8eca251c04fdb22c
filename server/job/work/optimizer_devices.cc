#include "server/job/work/optimizer_devices.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "server/device/device.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "server/device/ops/slice.h"

namespace shardd {
namespace {

constexpr int64_t kCutNumel = 4096;

// Elements [first, first + count) of an operation.
struct PartOf {
  int64_t first;
  int64_t count;
  DeviceOp operator()(const CopyOp& op) const {
    return CopyOp{static_cast<const char*>(op.src) + first, static_cast<char*>(op.dst) + first, count};
  }
  DeviceOp operator()(const ZeroOp& op) const { return ZeroOp{static_cast<char*>(op.dst) + first, count}; }
  DeviceOp operator()(const CastOp& op) const {
    return CastOp{At(op.src, op.from, first), op.from, At(op.dst, op.to, first), op.to, count, op.float8};
  }
  DeviceOp operator()(const NormOp& op) const { return NormOp{op.src + first, count, op.result}; }
  DeviceOp operator()(const AdamWOp& op) const {
    AdamWOp part = op;
    part.p = At(op.p, op.param_dtype, first);
    part.g = op.g + first;
    part.m = op.m + first;
    part.v = op.v + first;
    part.cast_dst = At(op.cast_dst, op.cast_dtype, first);
    part.numel = count;
    part.logged.first += first;
    return part;
  }
  DeviceOp operator()(const SgdOp& op) const {
    SgdOp part = op;
    part.p = At(op.p, op.param_dtype, first);
    part.g = op.g + first;
    part.buf = At(op.buf, first);
    part.cast_dst = At(op.cast_dst, op.cast_dtype, first);
    part.numel = count;
    part.logged.first += first;
    return part;
  }
  DeviceOp operator()(const RuleOp& op) const { return SliceOf(op, first, count); }
  // Whole: what needs whole parameters, and reductions and moves, which are never an optimizer's.
  DeviceOp operator()(const MuonOp& op) const { return op; }
  DeviceOp operator()(const AdafactorOp& op) const { return op; }
  DeviceOp operator()(const ReduceOp& op) const { return op; }
  DeviceOp operator()(const SumOp& op) const { return op; }
  DeviceOp operator()(const MoveOp& op) const { return op; }
};

bool MayCut(const DeviceOp& op) {
  return !std::holds_alternative<MuonOp>(op) && !std::holds_alternative<AdafactorOp>(op) &&
         !std::holds_alternative<ReduceOp>(op) && !std::holds_alternative<SumOp>(op) &&
         !std::holds_alternative<MoveOp>(op);
}

}  // namespace

DeviceOps SplitOps(std::vector<DeviceOp> ops, int parts) {
  DeviceOps result(static_cast<size_t>(parts));
  if (parts == 1) {
    result.front() = std::move(ops);
    return result;
  }
  const int64_t total = std::accumulate(ops.begin(), ops.end(), int64_t{0},
                                        [](int64_t sum, const DeviceOp& op) { return sum + OpExtent(op); });
  const int64_t share = std::max<int64_t>(kCutNumel, (total + parts - 1) / parts);
  size_t part = 0;
  int64_t taken = 0;  // by it
  for (DeviceOp& op : ops) {
    const int64_t extent = OpExtent(op);
    for (int64_t first = 0; first < extent;) {
      if (taken >= share && part + 1 < result.size()) {
        ++part;
        taken = 0;
      }
      const bool last = part + 1 == result.size();
      const int64_t room = (share - taken + kCutNumel - 1) / kCutNumel * kCutNumel;
      const int64_t count = last || !MayCut(op) ? extent - first : std::min(extent - first, room);
      result[part].push_back(count == extent ? std::move(op) : std::visit(PartOf{first, count}, op));
      first += count;
      taken += count;
    }
  }
  return result;
}

void LogByPart(std::vector<DeviceOp>* parts, int count, absl::FunctionRef<UpdateLog&(int part)> log_of,
               absl::FunctionRef<void(UpdateLog&, int64_t first)> begin) {
  for (int part = count - 1; part >= 0; --part) {  // the first says that all are begun
    bool is_first = true;
    for (DeviceOp& op : parts[part]) {
      const Logged* const logged = LoggedOf(op);
      if (logged == nullptr) continue;
      if (std::exchange(is_first, false)) begin(log_of(part), logged->first);
      UpdateLog* const log = &log_of(part);
      MutableLoggedOf(&op)->log = log;
    }
  }
}

OptimizerDevices::OptimizerDevices(std::vector<Device*> devices, int ranks)
    : devices_(std::move(devices)), for_each_rank_(static_cast<int>(devices_.size()) / ranks) {}

DeviceOps OptimizerDevices::Divide(DeviceOps by_rank, bool in_order) const {
  if (for_each_rank_ == 1) {
    return by_rank;
  }
  DeviceOps by_device;
  by_device.reserve(devices_.size());
  for (std::vector<DeviceOp>& ops : by_rank) {
    DeviceOps parts = SplitOps(std::move(ops), in_order ? 1 : for_each_rank_);
    parts.resize(static_cast<size_t>(for_each_rank_));
    for (std::vector<DeviceOp>& part : parts) by_device.push_back(std::move(part));
  }
  return by_device;
}

void OptimizerDevices::Submit(const std::string& label, DeviceOps by_device,
                              const std::function<void(absl::Status)>& done) const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    devices_[i]->Submit(StreamId::kOptimizer, {label, std::move(by_device[i]), done});
  }
}

}  // namespace shardd
