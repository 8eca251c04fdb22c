// Translates each kind of operation into calls of the driver.

#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/cuda/engine.h"
#include "server/device/cuda/engine_internal.h"
#include "server/device/device.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"

namespace shardd {
namespace {

CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }
// A kernel, and what a communicator may add: events and host functions.
constexpr int kCallsOfSum = 8;
// Of an update that is logged, beside its kernel: copies of old values, and words.
constexpr int kCallsOfLog = UpdateLog::kArrays + 3;

cuda::KernelDType Number(DType dtype) { return static_cast<cuda::KernelDType>(dtype); }
static_assert(cuda::kFloat32 == v1::DTYPE_FLOAT32 && cuda::kBFloat16 == v1::DTYPE_BFLOAT16 &&
              cuda::kFloat16 == v1::DTYPE_FLOAT16 && cuda::kFloat64 == v1::DTYPE_FLOAT64 &&
              cuda::kNoDType == v1::DTYPE_UNSPECIFIED);

}  // namespace

struct CudaEngine::Calls {
  CudaEngine& engine;
  StreamId id;
  CudaNormSlots::Slot slot;

  CUstream stream() const { return engine.streams_[static_cast<int>(id)]; }

  template <typename Args>
  absl::Status Launch(CUkernel kernel, const char* name, Args args, cuda::Geometry at) const {
    static_assert(std::is_trivially_copyable_v<Args>);
    void* params[] = {&args};
    return engine.CheckCall(engine.driver_->LaunchKernel(cu::FunctionOf(kernel), at.grid, 1, 1, at.block, 1, 1, 0,
                                                         stream(), params, nullptr),
                            "cuLaunchKernel", absl::StrCat(name, " on ", StreamName(id)));
  }
  template <typename Args>
  absl::Status Launch(CUkernel kernel, const char* name, const Args& args) const {
    return Launch(kernel, name, args, cuda::GeometryOf(args, engine.multiprocessors_));
  }
  absl::Status Copy(const void* src, void* dst, int64_t size_bytes) const {
    return engine.CheckCall(
        engine.driver_->MemcpyAsync(Address(dst), Address(src), static_cast<size_t>(size_bytes), stream()),
        "cuMemcpyAsync", absl::StrCat(size_bytes, " bytes on ", StreamName(id)));
  }

  absl::Status operator()(const CopyOp& op) const { return Copy(op.src, op.dst, op.size_bytes); }
  absl::Status operator()(const ZeroOp& op) const {
    return engine.CheckCall(
        engine.driver_->MemsetD8Async(Address(op.dst), 0, static_cast<size_t>(op.size_bytes), stream()),
        "cuMemsetD8Async", absl::StrCat(op.size_bytes, " bytes on ", StreamName(id)));
  }
  absl::Status operator()(const CastOp& op) const {
    if (op.float8) return absl::UnimplementedError("cast: float8 blocks are made on CPUs alone");
    // also for integers
    if (op.from == op.to) return Copy(op.src, op.dst, op.numel * DTypeSizeBytes(op.from));
    return Launch(engine.kernels_.cast, cuda::kCastKernel,
                  cuda::CastArgs{op.src, op.dst, op.numel, Number(op.from), Number(op.to), 1});
  }
  absl::Status operator()(const ReduceOp& op) const {
    cuda::ReduceArgs args = {};
    std::copy(op.sources.begin(), op.sources.end(), args.sources);
    args.source_count = static_cast<int32_t>(op.sources.size());
    args.source_dtype = Number(op.source_dtype);
    args.reduce_dtype = Number(op.reduce_dtype);
    args.keep = Number(op.keep);
    args.scale = op.scale;
    args.accumulate = op.accumulate ? 1 : 0;
    args.dst = op.dst;
    args.numel = op.numel;
    return Launch(engine.kernels_.reduce, cuda::kReduceKernel, args);
  }
  absl::Status operator()(const NormOp& op) const {
    char* const scratch = static_cast<char*>(engine.scratch_.data()) + static_cast<int>(id) * kCudaScratchBytes;
    for (int64_t first = 0; first < op.numel; first += kCudaNormPieceNumel) {
      cuda::NormArgs args = {};
      args.src = op.src + first;
      args.numel = std::min(op.numel - first, kCudaNormPieceNumel);
      args.order = op.result->order();
      args.scratch = reinterpret_cast<NormState*>(scratch);
      args.result = slot.device;
      SHARDD_RETURN_IF_ERROR(Launch(engine.kernels_.norm, cuda::kNormKernel, args));
      SHARDD_RETURN_IF_ERROR(
          Launch(engine.kernels_.norm_finish, cuda::kNormFinishKernel, args, cuda::NormFinishGeometry()));
    }
    return absl::OkStatus();
  }
  absl::Status Store(void* word, int64_t value) const {
    return engine.CheckCall(engine.driver_->StreamWriteValue64(stream(), Address(word), static_cast<uint64_t>(value),
                                                               CU_STREAM_WRITE_VALUE_DEFAULT),
                            "cuStreamWriteValue64", absl::StrCat("a word of the update's log on ", StreamName(id)));
  }
  // `launch` changes what `updated` says. Each call's effects are there before the next one's: the stream runs them in
  // this order, and a word is stored behind a fence. The one place serves every piece, because the old values of a
  // piece are copied when the piece before is done.
  template <typename Op, typename Launched>
  absl::Status WithLog(const Op& op, const Launched& launch) const {
    if (op.logged.log == nullptr) return launch();
    const UpdatedArrays updated = UpdatedArraysOf(op, 0, op.numel);
    for (int i = 0; i < UpdateLog::kArrays; ++i) {
      const UpdateLog::Array& array = updated.arrays[i];
      if (array.data == nullptr) continue;
      SHARDD_RETURN_IF_ERROR(Copy(array.data, OldValues(op.logged.place, i), array.size_bytes));
    }
    const UpdateLog::Words words = op.logged.log->words();
    SHARDD_RETURN_IF_ERROR(Store(words.count, op.numel));
    SHARDD_RETURN_IF_ERROR(Store(words.begun, op.logged.first));
    SHARDD_RETURN_IF_ERROR(launch());
    return Store(words.done, op.logged.first + op.numel);
  }
  absl::Status operator()(const AdamWOp& op) const {
    return WithLog(op, [&] {
      return Launch(engine.kernels_.adamw, cuda::kAdamWKernel,
                    cuda::AdamWArgs{MakeAdamWScalars(op.params), Number(op.param_dtype), op.p, op.g, op.m, op.v,
                                    op.cast_dst, Number(op.cast_dtype), op.numel});
    });
  }
  absl::Status operator()(const SgdOp& op) const {
    return WithLog(op, [&] {
      return Launch(
          engine.kernels_.sgd, cuda::kSgdKernel,
          cuda::SgdArgs{MakeSgdScalars(op.params), op.params.nesterov ? 1 : 0, op.params.first_step ? 1 : 0,
                        Number(op.param_dtype), op.p, op.g, op.buf, op.cast_dst, Number(op.cast_dtype), op.numel});
    });
  }
  absl::Status operator()(const RuleOp& op) const {
    static_assert(static_cast<int>(UpdateRule::kAdagrad) == cuda::kAdagradRule &&
                  static_cast<int>(UpdateRule::kRmsprop) == cuda::kRmspropRule &&
                  static_cast<int>(UpdateRule::kRmspropMomentum) == cuda::kRmspropMomentumRule &&
                  static_cast<int>(UpdateRule::kRmspropCentered) == cuda::kRmspropCenteredRule &&
                  static_cast<int>(UpdateRule::kLion) == cuda::kLionRule && kUpdateRules == 5);
    if (static_cast<int>(op.params.rule) >= kUpdateRules) {
      return absl::UnimplementedError(absl::StrCat("update by ", UpdateRuleName(op.params.rule),
                                                   ": GPUs have no kernel of a rule with three states"));
    }
    return WithLog(op, [&] {
      return Launch(
          engine.kernels_.rule, cuda::kRuleKernel,
          cuda::RuleArgs{MakeRuleScalars(op.params), static_cast<cuda::RuleNumber>(op.params.rule),
                         Number(op.param_dtype), op.p, op.g, op.a, op.b, op.cast_dst, Number(op.cast_dtype), op.numel});
    });
  }
  absl::Status operator()(const MuonOp&) const {
    return absl::UnimplementedError("update by muon: GPUs have no kernel of it");
  }
  absl::Status operator()(const AdafactorOp&) const {
    return absl::UnimplementedError("update by adafactor: GPUs have no kernel of it");
  }
  absl::Status operator()(const SumOp& op) const { return op.communicator->Enqueue(op, stream()); }
  absl::Status operator()(const MoveOp& op) const { return op.communicator->Enqueue(op, stream()); }
};

absl::Status CudaEngine::Check(const DeviceOp& op) {
  SHARDD_RETURN_IF_ERROR(CheckOp(op));
  if (const Logged* const logged = LoggedOf(op);
      logged != nullptr && (logged->place.old == nullptr || logged->place.numel <= 0)) {
    return absl::InternalError("update: it is to be logged, and there is no memory of the GPU for its old values");
  }
  const ReduceOp* const reduce = std::get_if<ReduceOp>(&op);
  if (reduce != nullptr && reduce->sources.size() > static_cast<size_t>(cuda::kMaxReduceSources)) {
    return absl::InternalError(absl::StrCat("reduce: more sources than a kernel takes (got ", reduce->sources.size(),
                                            ", want at most ", cuda::kMaxReduceSources, ")"));
  }
  if (reduce != nullptr && !IsTrainable(reduce->source_dtype)) {
    return absl::InternalError(absl::StrCat("reduce: no kernel takes the source dtype (got ",
                                            DTypeName(reduce->source_dtype), ", want float32, bfloat16 or float16)"));
  }
  return absl::OkStatus();
}

int CudaEngine::CallsOf(const DeviceOp& op) const {
  if (std::holds_alternative<SumOp>(op) || std::holds_alternative<MoveOp>(op)) return kCallsOfSum;
  const NormOp* const norm = std::get_if<NormOp>(&op);
  if (norm == nullptr) return LoggedOf(op) == nullptr ? 1 : 1 + kCallsOfLog;
  return static_cast<int>(2 * ((norm->numel + kCudaNormPieceNumel - 1) / kCudaNormPieceNumel));
}

absl::Status CudaEngine::Issue(StreamId stream, const DeviceOp& op, CudaNormSlots::Slot slot) {
  if (OpExtent(op) == 0) return absl::OkStatus();
  return std::visit(Calls{*this, stream, slot}, op);
}

}  // namespace shardd
