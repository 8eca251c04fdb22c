#include "server/device/cpu/cpu_ops.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/status/status_macros.h"
#include "common/tensor/float8_blocks.h"
#include "common/tensor/update_log.h"
#include "common/tensor/update_scalars.h"
#include "server/device/device_op.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "server/device/ops/slice.h"

namespace shardd {
namespace {

constexpr int64_t kNormSliceNumel = int64_t{1} << 20;
// Slices begin at multiples of this many elements, and so on cache lines if operations do.
constexpr int64_t kSliceAlignment = 4096;
static_assert(kSliceAlignment % kFloat8BlockNumel == 0);

// Piece of a result that is written through its file: it and as much of two sources fit a core's cache.
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kFilePieceBytes = 32 * kPageBytes;

// Whether a page in the middle of the file's [offset_bytes, offset_bytes + size_bytes) is absent. Pages come and go in
// long runs, so one is enough. The file is asked and not the mapping (mincore), which would wait for whatever maps
// and unmaps memory elsewhere in the process: gigabytes of other jobs.
bool IsAbsent(int file, int64_t offset_bytes, int64_t size_bytes) {
  if (size_bytes < kFilePieceBytes) return false;
  const int64_t middle = (offset_bytes + size_bytes / 2) / kPageBytes * kPageBytes;
  const off_t present = lseek(file, middle, SEEK_DATA);
  return present > middle || (present < 0 && errno == ENXIO);
}

struct Slice {
  int64_t first;
  int64_t count;
  void operator()(const CopyOp& op) const {
    CopyBytes(static_cast<const char*>(op.src) + first, static_cast<char*>(op.dst) + first, count);
  }
  void operator()(const ZeroOp& op) const { std::memset(static_cast<char*>(op.dst) + first, 0, count); }
  void operator()(const CastOp& op) const {
    if (op.float8) {
      RoundToFloat8Blocks(At(op.src, op.from, first), op.from, At(op.dst, op.to, first), op.to, count);
      return;
    }
    Cast(At(op.src, op.from, first), op.from, At(op.dst, op.to, first), op.to, count);
  }
  void operator()(const ReduceOp& op) const {
    if (first == 0) {
      Reduce(op, op.sources);
      return;
    }
    std::vector<const void*> sources;
    sources.reserve(op.sources.size());
    for (const void* source : op.sources) sources.push_back(At(source, op.source_dtype, first));
    Reduce(op, sources);
  }
  void Reduce(const ReduceOp& op, const std::vector<const void*>& sources) const {
    constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
    if (op.dst_file >= 0 && !op.accumulate &&
        IsAbsent(op.dst_file, op.dst_file_offset_bytes + first * kFloatBytes, count * kFloatBytes)) {
      ReduceThroughFile(op, sources);
      return;
    }
    ReduceSources(sources, op.source_dtype, op.reduce_dtype, op.keep, op.scale, op.accumulate, op.dst + first, count);
  }
  // Writes through the file, which fills a page directly, where a store would fault, clear and map it first. A write
  // that fails (the file is full) leaves the rest to stores.
  void ReduceThroughFile(const ReduceOp& op, std::vector<const void*> sources) const {
    // Only for threads that come here: an array would be part of every thread's memory.
    static thread_local const std::unique_ptr<char, void (*)(void*)> piece(
        static_cast<char*>(std::aligned_alloc(64, kFilePieceBytes)), &std::free);
    auto* const sum = reinterpret_cast<float*>(piece.get());
    int64_t offset_bytes = op.dst_file_offset_bytes + first * static_cast<int64_t>(sizeof(float));
    float* dst = op.dst + first;
    for (int64_t done = 0; done < count;) {
      // Up to the end of a page, so that all pages except the first and the last are written whole.
      const int64_t end_bytes = (offset_bytes / kPageBytes * kPageBytes) + kFilePieceBytes;
      const int64_t numel = std::min(count - done, (end_bytes - offset_bytes) / static_cast<int64_t>(sizeof(float)));
      const int64_t size_bytes = numel * static_cast<int64_t>(sizeof(float));
      ReduceSources(sources, op.source_dtype, op.reduce_dtype, op.keep, op.scale, false, sum, numel);
      int64_t written = 0;
      while (written < size_bytes) {
        const ssize_t wrote = pwrite(op.dst_file, piece.get() + written, static_cast<size_t>(size_bytes - written),
                                     offset_bytes + written);
        if (wrote <= 0 && !(wrote < 0 && errno == EINTR)) {
          std::memcpy(reinterpret_cast<char*>(dst) + written, piece.get() + written,
                      static_cast<size_t>(size_bytes - written));
          break;
        }
        written += std::max<ssize_t>(wrote, 0);
      }
      for (const void*& source : sources) source = At(source, op.source_dtype, numel);
      offset_bytes += size_bytes;
      dst += numel;
      done += numel;
    }
  }
  void operator()(const NormOp& op) const { op.result->Add(op.src + first, count); }
  void operator()(const AdamWOp& op) const {
    AdamWUpdateWith(MakeAdamWScalars(op.params), At(op.p, op.param_dtype, first), op.param_dtype, op.g + first,
                    op.m + first, op.v + first, At(op.cast_dst, op.cast_dtype, first), op.cast_dtype, count,
                    op.logged.log, op.logged.first + first);
  }
  void operator()(const SgdOp& op) const {
    SgdUpdateWith(MakeSgdScalars(op.params), op.params.nesterov, op.params.first_step, At(op.p, op.param_dtype, first),
                  op.param_dtype, op.g + first, At(op.buf, first), At(op.cast_dst, op.cast_dtype, first), op.cast_dtype,
                  count, op.logged.log, op.logged.first + first);
  }
  void operator()(const RuleOp& op) const {
    RuleUpdateWith(op.params.rule, MakeRuleScalars(op.params), At(op.p, op.param_dtype, first), op.param_dtype,
                   op.g + first, op.a + first, At(op.b, first), At(op.cast_dst, op.cast_dtype, first), op.cast_dtype,
                   count, op.logged.log, op.logged.first + first, At(op.c, first));
  }
  void operator()(const MuonOp& op) const {
    for (int64_t item = first; item < first + count; ++item) {
      RunMuonItem(op.matrix, item, op.logged.log, op.logged.first);
    }
  }
  void operator()(const AdafactorOp& op) const {
    for (int64_t item = first; item < first + count; ++item) {
      RunAdafactorItem(op.tensor, item, op.logged.log, op.logged.first);
    }
  }
  void operator()(const SumOp&) const {}   // CheckCpuOp refuses it
  void operator()(const MoveOp&) const {}  // likewise
};

using Workspace = std::unique_ptr<void, void (*)(void*)>;

// For whoever completes an update; `what` is what is updated.
absl::StatusOr<Workspace> MakeWorkspace(int64_t size_bytes, absl::string_view what) {
  Workspace workspace(std::aligned_alloc(64, static_cast<size_t>((size_bytes + 63) / 64 * 64)), &std::free);
  if (workspace == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("complete an update of a ", what, ": no memory to work in (want ",
                                                     size_bytes, " bytes); give the daemon more, and start it again"));
  }
  return workspace;
}

// Buffer, then parameter; what lies between the two is made again where anything of the parameter is to be done.
absl::Status CompleteMuon(const MuonOp& op, int64_t step) {
  MuonMatrix matrix = op.matrix;
  const int64_t numel = matrix.rows * matrix.cols;
  UpdateLog* const log = op.logged.log;
  const int64_t done = log == nullptr ? 0 : std::clamp<int64_t>(log->done(step) - op.logged.first, 0, 2 * numel);
  if (matrix.cast_dst != nullptr && done > numel) {  // which may be behind
    Cast(matrix.p, matrix.param_dtype, matrix.cast_dst, matrix.cast_dtype, done - numel);
  }
  if (done == 2 * numel) return absl::OkStatus();
  Workspace workspace(nullptr, &std::free);
  if (matrix.workspace == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(workspace, MakeWorkspace(MuonWorkspaceBytes(matrix.rows, matrix.cols),
                                                     absl::StrCat(matrix.rows, " x ", matrix.cols, " matrix")));
    matrix.workspace = static_cast<float*>(workspace.get());
  }
  if (log != nullptr && log->done(step) == op.logged.first + done && log->is_torn(step)) {
    const int64_t end = done < numel ? numel : 2 * numel;
    log->PutBack(UpdatedArraysOf(op, done, std::min(log->block_numel(), end - done)).arrays);
  }
  RunMuonFrom(matrix, done, log, op.logged.first);
  return absl::OkStatus();
}

// States, then parameter.
absl::Status CompleteAdafactor(const AdafactorOp& op, int64_t step) {
  AdafactorTensor tensor = op.tensor;
  const int64_t rows = tensor.shape.row_numel(), states = rows + tensor.shape.col_numel();
  const int64_t all = states + tensor.shape.numel();
  UpdateLog* const log = op.logged.log;
  const int64_t done = log == nullptr ? 0 : std::clamp<int64_t>(log->done(step) - op.logged.first, 0, all);
  if (tensor.cast_dst != nullptr && done > states) {  // which may be behind
    Cast(tensor.p, tensor.param_dtype, tensor.cast_dst, tensor.cast_dtype, done - states);
  }
  if (done == all) return absl::OkStatus();
  Workspace workspace(nullptr, &std::free);
  if (tensor.workspace == nullptr) {
    SHARDD_ASSIGN_OR_RETURN(workspace, MakeWorkspace(AdafactorWorkspaceBytes(tensor.shape),
                                                     absl::StrCat("parameter of ", tensor.shape.numel(), " elements")));
    tensor.workspace = static_cast<float*>(workspace.get());
  }
  if (log != nullptr && log->done(step) == op.logged.first + done && log->is_torn(step)) {
    const int64_t end = done < rows ? rows : done < states ? states : all;
    log->PutBack(UpdatedArraysOf(op, done, std::min(log->block_numel(), end - done)).arrays);
  }
  RunAdafactorFrom(tensor, done, log, op.logged.first);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCpuOp(const DeviceOp& op) {
  if (std::holds_alternative<SumOp>(op)) return absl::InternalError("sum: no communicator reaches the host's memory");
  if (std::holds_alternative<MoveOp>(op)) return absl::InternalError("move: no communicator reaches the host's memory");
  return CheckOp(op);
}

int64_t CpuOpBytes(const DeviceOp& op, int64_t count) {
  // Zeroing memory that arrives with the first store takes four times as long.
  return count * OpBytesOfOne(op) * (std::holds_alternative<ZeroOp>(op) ? 4 : 1);
}

int64_t CpuOpSlice(const DeviceOp& op) {
  if (std::holds_alternative<NormOp>(op)) return kNormSliceNumel;
  if (std::holds_alternative<MuonOp>(op) || std::holds_alternative<AdafactorOp>(op)) return 1;
  const int64_t extent = kSliceBytes / CpuOpBytes(op, 1) / kSliceAlignment * kSliceAlignment;
  return std::max(extent, kSliceAlignment);
}

void RunCpuOp(const DeviceOp& op, int64_t first, int64_t count) { std::visit(Slice{first, count}, op); }

absl::Status CompleteCpuOp(const DeviceOp& op, int64_t step) {
  const auto complete = [&](const auto& update) {
    if (update.logged.log == nullptr) {
      RunCpuOp(op, 0, update.numel);
      return;
    }
    UpdateLog& log = *update.logged.log;
    const int64_t first = std::clamp<int64_t>(log.done(step) - update.logged.first, 0, update.numel);
    if (update.cast_dst != nullptr) {  // which may be behind
      Cast(update.p, update.param_dtype, update.cast_dst, update.cast_dtype, first);
    }
    if (first == update.numel) return;  // done
    if (log.done(step) == update.logged.first + first && log.is_torn(step)) {
      log.PutBack(UpdatedArraysOf(update, first, std::min(log.block_numel(), update.numel - first)).arrays);
    }
    RunCpuOp(op, first, update.numel - first);
  };
  if (const auto* const adamw = std::get_if<AdamWOp>(&op); adamw != nullptr) {
    complete(*adamw);
  } else if (const auto* const sgd = std::get_if<SgdOp>(&op); sgd != nullptr) {
    complete(*sgd);
  } else if (const auto* const rule = std::get_if<RuleOp>(&op); rule != nullptr) {
    complete(*rule);
  } else if (const auto* const muon = std::get_if<MuonOp>(&op); muon != nullptr) {
    return CompleteMuon(*muon, step);
  } else if (const auto* const adafactor = std::get_if<AdafactorOp>(&op); adafactor != nullptr) {
    return CompleteAdafactor(*adafactor, step);
  } else {
    RunCpuOp(op, 0, OpExtent(op));
  }
  return absl::OkStatus();
}

}  // namespace shardd
