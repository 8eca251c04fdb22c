// One backward of a rank, forward included: what the trainer asks of the daemon while it computes.

#include <algorithm>
#include <cstdint>

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/trainer.h"

namespace shardd::e2e {

void Trainer::ReadParam(int param) {
  const void* const data = job_->parameter_data(param_[param]);
  const std::string& dtype = dtype_[kGroupOfParam[param]];
  if (dtype != "bf16" && dtype != "fp16") {
    unsharded_.Read(seen_[param].data(), data, sizeof(float) * kNumel[param]);
    return;
  }
  std::vector<uint16_t> halves(static_cast<size_t>(kNumel[param]));
  unsharded_.Read(halves.data(), data, sizeof(uint16_t) * halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    seen_[param][i] = dtype == "bf16" ? tensor::Bf16ToFloat(halves[i]) : tensor::HalfToFloat(halves[i]);
  }
}

Status Trainer::ReadGroup(int group, shardd_phase phase, bool hold) {
  ParameterGroup handle = job_->group(group_[group]);
  RETURN_IF_ERROR(handle.Unshard(phase));
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] == group || (group == kHead && p == kEmbed)) ReadParam(p);
  }
  return hold ? Status() : handle.Reshard();
}

Status Trainer::Release(int group) { return job_->group(group_[group]).Reshard(); }

Status Trainer::Submit(int group, int64_t step, int micro) {
  if (moments_.At("skip", kGroupNames[group], step)) {
    return Status();
  }
  ParameterGroup handle = job_->group(group_[group]);
  RETURN_IF_ERROR(handle.WaitGradientSlot());
  uint8_t present = 0, fresh = 0;
  const shardd_group_info info = handle.info();
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] != group || !IsPresent(args_.Text("absent"), data_rank_, step, p)) {
      continue;
    }
    for (int bit = 0; bit < info.param_count; ++bit) {
      if (info.params[bit] != param_[p]) continue;
      present = static_cast<uint8_t>(present | (1u << bit));
      if (IsFresh(args_.Text("fresh"), micro, p)) fresh = static_cast<uint8_t>(fresh | (1u << bit));
    }
    WriteGradient(p);
  }
  const bool masks = !args_.Text("absent").empty() || !args_.Text("fresh").empty();
  RETURN_IF_ERROR(handle.SubmitGradients(masks ? &present : nullptr, masks ? &fresh : nullptr));
  moments_.Reach(std::string("submitted_") + kGroupNames[group], step);
  return Status();
}

void Trainer::WriteGradient(int param) {
  void* const slot = job_->gradient_data(param_[param]);
  const std::string& dtype = dtype_[kGroupOfParam[param]];
  const Tensor& gradient = gradient_[param];
  if (dtype != "bf16" && dtype != "fp16") {
    unsharded_.Write(slot, gradient.data(), sizeof(float) * gradient.size());
    return;
  }
  std::vector<uint16_t> halves(gradient.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    halves[i] = dtype == "bf16" ? tensor::FloatToBf16(gradient[i]) : tensor::FloatToHalf(gradient[i]);
  }
  unsharded_.Write(slot, halves.data(), sizeof(uint16_t) * halves.size());
}

Status Trainer::InPass(int64_t step, const std::function<Status()>& body) {
  if (args_.Int("edits") == 0) return body();
  RETURN_IF_ERROR(job_->EnterPass());
  moments_.Reach("entered", step);
  RETURN_IF_ERROR(body());
  return job_->LeavePass();
}

Status Trainer::ForwardBackward(int64_t step, int micro, bool last) {
  const std::vector<int> odd = ParseOrder(Odd("odd_order", step));
  if (!odd.empty() || !order_.empty()) {
    RETURN_IF_ERROR(OutOfOrder(odd.empty() ? order_ : odd, step, micro));
    return job_->BackwardDone(last);
  }
  Pass pass(MakeBatch(data_rank_, step, micro));
  gradient_ = Zeros();
  RETURN_IF_ERROR(ReadGroup(kRoot, SHARDD_FORWARD, /*hold=*/true));
  RETURN_IF_ERROR(ReadGroup(kEmbedGroup, SHARDD_FORWARD, !raf_[kEmbedGroup]));
  pass.ForwardEmbed(seen_[kEmbed]);
  RETURN_IF_ERROR(ReadGroup(kMid, SHARDD_FORWARD, true));
  RETURN_IF_ERROR(Come("unsharded", step));
  ReadParam(kW1);  // once more, as it is now
  pass.ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]);
  if (raf_[kMid]) RETURN_IF_ERROR(Release(kMid));
  RETURN_IF_ERROR(ReadGroup(kHead, SHARDD_FORWARD, !raf_[kHead]));
  pass.ForwardHead(seen_[kEmbed], seen_[kU]);
  report_.losses[step] += pass.Loss(seen_[kBias], seen_[kGain]) / std::max(1, args_.Int("micro", 1));
  if (raf_[kRoot]) {
    RETURN_IF_ERROR(Release(kRoot));
    RETURN_IF_ERROR(ReadGroup(kRoot, SHARDD_BACKWARD, true));
  }
  pass.BackwardRoot(seen_[kGain], gradient_);
  if (raf_[kHead]) RETURN_IF_ERROR(ReadGroup(kHead, SHARDD_BACKWARD, true));
  pass.BackwardHead(seen_[kEmbed], seen_[kU], gradient_);
  RETURN_IF_ERROR(Submit(kHead, step, micro));
  RETURN_IF_ERROR(Release(kHead));
  RETURN_IF_ERROR(Come("some_gradients", step));
  if (raf_[kMid]) RETURN_IF_ERROR(ReadGroup(kMid, SHARDD_BACKWARD, true));
  pass.BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], gradient_);
  RETURN_IF_ERROR(Submit(kMid, step, micro));
  RETURN_IF_ERROR(Release(kMid));
  if (raf_[kEmbedGroup]) RETURN_IF_ERROR(ReadGroup(kEmbedGroup, SHARDD_BACKWARD, true));
  pass.BackwardEmbed(gradient_);
  RETURN_IF_ERROR(Submit(kEmbedGroup, step, micro));
  RETURN_IF_ERROR(Release(kEmbedGroup));
  RETURN_IF_ERROR(Come("root_held", step));
  const Tensor bias = seen_[kBias];
  ReadParam(kBias);  // still unsharded since forward: the version of this pass, whoever has stepped meanwhile
  if (bias != seen_[kBias]) {
    return Status(Code::kDataLoss, "the root's parameters changed within a pass");
  }
  RETURN_IF_ERROR(Submit(kRoot, step, micro));
  RETURN_IF_ERROR(Release(kRoot));
  RETURN_IF_ERROR(job_->BackwardDone(last));
  moments_.Reach("backward_done", step);
  return Status();
}

Status Trainer::OutOfOrder(const std::vector<int>& order, int64_t step, int micro) {
  for (int group : order) RETURN_IF_ERROR(ReadGroup(group, SHARDD_FORWARD, /*hold=*/false));
  Pass pass(MakeBatch(data_rank_, step, micro));
  gradient_ = Zeros();
  pass.ForwardEmbed(seen_[kEmbed]);
  pass.ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]);
  pass.ForwardHead(seen_[kEmbed], seen_[kU]);
  report_.losses[step] += pass.Loss(seen_[kBias], seen_[kGain]) / std::max(1, args_.Int("micro", 1));
  pass.BackwardRoot(seen_[kGain], gradient_);
  pass.BackwardHead(seen_[kEmbed], seen_[kU], gradient_);
  pass.BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], gradient_);
  pass.BackwardEmbed(gradient_);
  for (int group : order) {
    RETURN_IF_ERROR(ReadGroup(group, SHARDD_BACKWARD, /*hold=*/false));
    RETURN_IF_ERROR(Submit(group, step, micro));
  }
  return Status();
}

}  // namespace shardd::e2e
