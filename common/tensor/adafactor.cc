#include "common/tensor/adafactor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/tensor/float_bits.h"
#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"
#include "common/tensor/logged_blocks.h"
#include "common/tensor/trainable_internal.h"
#include "common/tensor/update_and_cast_internal.h"
#include "common/tensor/update_log.h"

namespace shardd {
namespace {

constexpr int64_t kItemNumel = int64_t{1} << 18;  // of a pass over elements
constexpr int64_t kChunkNumel = 1024;             // what is between two loops lies in L1
constexpr int64_t kHeaderDoubles = 8;
constexpr int kLanes = 8;

int64_t Blocks(int64_t numel) { return (numel + kItemNumel - 1) / kItemNumel; }

// torch.lerp, in its order: from the nearer end.
SHARDD_ALWAYS_INLINE float Lerp(float from, float to, float weight) {
  return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1 - weight);
}

// The same bits with every instruction set: lanes are added by element, and then in their order.
SHARDD_ALWAYS_INLINE double SumOf(const double* values, int64_t numel) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  }
  for (int lane = 0; i < numel; ++i, ++lane) lanes[lane] += values[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// What a parameter's elements are multiplied by, and where sums are.
struct Factors {
  AdafactorShape shape;
  const float* g;
  float scale;
  const float* row;    // a vector's v
  const float* col;    // null: it is a vector
  const double* mean;  // of row, by matrix, not below eps1
  float least;         // of v: eps1 squared
  double* row_sums;
  double* col_sums;
};

// Calls visit(row, column, matrix, begin, count) for runs of elements in one row; `begin` counts
// from `first`, rows and columns over all matrices.
template <typename Visit>
SHARDD_ALWAYS_INLINE void ForRuns(const AdafactorShape& shape, int64_t first, int64_t count, Visit visit) {
  int64_t row = first / shape.cols, col = first % shape.cols;
  int64_t matrix = row / shape.rows, row_of_matrix = row % shape.rows;
  for (int64_t begin = 0; begin < count;) {
    const int64_t left = shape.cols - col;
    const int64_t run = left < count - begin ? left : count - begin;
    visit(row, matrix * shape.cols + col, matrix, begin, run);
    begin += run;
    col = 0;
    ++row;
    if (++row_of_matrix == shape.rows) {
      row_of_matrix = 0;
      ++matrix;
    }
  }
}

// Squares of gradients are added to their rows' sums and their columns'.
struct SumsBody {
  static SHARDD_ALWAYS_INLINE void Run(const Factors& of, int64_t first, int64_t numel) {
    double squares[kChunkNumel];
    const float* __restrict g = of.g + first;
    const float scale = of.scale;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) {
      const double scaled = g[i] * scale;
      squares[i] = scaled * scaled;
    }
    ForRuns(
        of.shape, first,
        numel, [&](int64_t row, int64_t col, int64_t, int64_t begin, int64_t count) __attribute__((always_inline)) {
          double* __restrict sums = of.col_sums + col;
          const double* __restrict square = squares + begin;
          SHARDD_NO_ALIAS
          for (int64_t i = 0; i < count; ++i) sums[i] += square[i];
          of.row_sums[row] += SumOf(square, count);
        });
  }
};

// out = u
struct DirectionBody {
  static SHARDD_ALWAYS_INLINE void Run(const Factors& of, int64_t first, int64_t numel, float* direction) {
    const float scale = of.scale, least = of.least;
    if (of.col == nullptr) {
      const float* __restrict g = of.g + first;
      const float* __restrict v = of.row + first;
      float* __restrict out = direction;
      SHARDD_NO_ALIAS
      for (int64_t i = 0; i < numel; ++i) {
        const float square = v[i] < least ? least : v[i];  // not a number stays one
        out[i] = 1.0f / __builtin_sqrtf(square) * (g[i] * scale);
      }
      return;
    }
    ForRuns(
        of.shape, first, numel,
        [&](int64_t row, int64_t col, int64_t matrix, int64_t begin, int64_t count) __attribute__((always_inline)) {
          const float* __restrict g = of.g + first + begin;
          const float* __restrict cols = of.col + col;
          float* __restrict out = direction + begin;
          const float of_row = of.row[row];
          const auto mean = static_cast<float>(of.mean[matrix]);
          SHARDD_NO_ALIAS
          for (int64_t i = 0; i < count; ++i) {
            const float v = of_row * cols[i] / mean;
            const float square = v < least ? least : v;
            out[i] = 1.0f / __builtin_sqrtf(square) * (g[i] * scale);
          }
        });
  }
};

// The sum of squares of u.
struct SquareDirectionBody {
  static SHARDD_ALWAYS_INLINE void Run(const Factors& of, int64_t first, int64_t numel, double* sum) {
    float direction[kChunkNumel];
    double squares[kChunkNumel];
    DirectionBody::Run(of, first, numel, direction);
    for (int64_t i = 0; i < numel; ++i) squares[i] = static_cast<double>(direction[i]) * direction[i];
    *sum += SumOf(squares, numel);
  }
};

template <typename Param>
struct SquareParamBody {
  static SHARDD_ALWAYS_INLINE void Run(const void* param, int64_t numel, double* sum) {
    const auto* __restrict p = static_cast<const typename Param::Storage*>(param);
    double squares[kChunkNumel];
    for (int64_t i = 0; i < numel; ++i) {
      const double value = Param::Load(p[i]);
      squares[i] = value * value;
    }
    *sum += SumOf(squares, numel);
  }
};

// p = decay * p - step * u
template <typename Param>
struct StepBody {
  static SHARDD_ALWAYS_INLINE void Run(const Factors& of, void* param, float decay, float step, int64_t first,
                                       int64_t numel) {
    float direction[kChunkNumel];
    for (int64_t done = 0; done < numel; done += kChunkNumel) {
      const int64_t count = numel - done < kChunkNumel ? numel - done : kChunkNumel;
      DirectionBody::Run(of, first + done, count, direction);
      auto* __restrict p = static_cast<typename Param::Storage*>(param) + first + done;
      SHARDD_NO_ALIAS
      for (int64_t i = 0; i < count; ++i) p[i] = Param::Store(Param::Load(p[i]) * decay - step * direction[i]);
    }
  }
};

template <typename Param>
struct LoggedStepBody {
  static SHARDD_ALWAYS_INLINE void Run(const Factors& of, void* param, float decay, float step, int64_t first,
                                       int64_t numel, UpdateLog* log, int64_t logged) {
    auto* const p = static_cast<typename Param::Storage*>(param);
    RunLogged(
        log, logged, numel,
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { log->Save(0, p + first + i, count * static_cast<int64_t>(sizeof(*p))); },
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { StepBody<Param>::Run(of, param, decay, step, first + i, count); });
  }
};

using SquareFn = void (*)(const void*, int64_t, double*);
using StepFn = void (*)(const Factors&, void*, float, float, int64_t, int64_t);
using LoggedStepFn = void (*)(const Factors&, void*, float, float, int64_t, int64_t, UpdateLog*, int64_t);
struct ParamFns {
  SquareFn square;
  StepFn step;
  LoggedStepFn logged_step;
};

template <typename Param>
ParamFns SelectParamOf() {
  const tensor::Isa isa = tensor::CurrentIsa();
  return {
      tensor::Select<SquareParamBody<Param>, const void*, int64_t, double*>(isa),
      tensor::Select<StepBody<Param>, const Factors&, void*, float, float, int64_t, int64_t>(isa),
      tensor::Select<LoggedStepBody<Param>, const Factors&, void*, float, float, int64_t, int64_t, UpdateLog*, int64_t>(
          isa)};
}

ParamFns SelectParam(DType dtype) {
  return tensor::WithTrainable(dtype, "Adafactor update of",
                               [](auto param) { return SelectParamOf<decltype(param)>(); });
}

double MachineEpsilon(DType dtype) {
  return std::ldexp(1.0, dtype == v1::DTYPE_BFLOAT16 ? -7 : dtype == v1::DTYPE_FLOAT16 ? -10 : -23);
}

// One parameter's update, item by item.
class Items {
 public:
  explicit Items(const AdafactorTensor& of)
      : of_(of),
        fns_(SelectParam(of.param_dtype)),
        eps1_(of.params.eps1 < 0 ? MachineEpsilon(of.param_dtype) : of.params.eps1),
        sums_(reinterpret_cast<double*>(of.workspace)),
        row_sums_(sums_ + kHeaderDoubles),
        col_sums_(row_sums_ + (of.shape.is_factored ? of.shape.row_numel() : 0)),
        means_(col_sums_ + of.shape.col_numel()),
        factors_{of.shape,
                 of.g,
                 static_cast<float>(of.params.grad_scale),
                 of.row,
                 of.shape.is_factored ? of.col : nullptr,
                 means_,
                 static_cast<float>(eps1_ * eps1_),
                 row_sums_,
                 col_sums_} {}

  int64_t numel() const { return of_.shape.numel(); }
  int64_t state_numel() const { return of_.shape.row_numel() + of_.shape.col_numel(); }

  // Elements [first, first + count) of what is read before anything changes.
  void Sums(int64_t first, int64_t count) const {
    if (first == 0) std::fill(sums_, means_, 0.0);
    const auto sums = tensor::Select<SumsBody, const Factors&, int64_t, int64_t>(tensor::CurrentIsa());
    const int64_t bytes = DTypeSizeBytes(of_.param_dtype);
    ForChunks(first, count, [&](int64_t at, int64_t n) {
      fns_.square(static_cast<const char*>(of_.p) + at * bytes, n, &sums_[kOfParam]);
      if (of_.shape.is_factored) sums(factors_, at, n);
    });
  }
  // Elements [first, first + count) of both states.
  void States(int64_t first, int64_t count, UpdateLog* log, int64_t log_first) const {
    const int64_t rows = of_.shape.row_numel();
    const int64_t of_rows = std::clamp<int64_t>(rows - first, 0, count);
    State(1, of_.row, row_sums_, of_.shape.cols, first, of_rows, log, log_first + first);
    State(2, of_.col, col_sums_, of_.shape.rows, first + of_rows - rows, count - of_rows, log,
          log_first + first + of_rows);
  }
  // What is needed beside states and gradient, from the first change of p on.
  void Means(UpdateLog* log) const {
    if (log != nullptr) log->Remember(sums_[kOfParam]);
    sums_[kOfDirection] = 0;
    for (int64_t matrix = 0; of_.shape.is_factored && matrix < of_.shape.matrices; ++matrix) {
      double sum = 0;
      for (int64_t row = 0; row < of_.shape.rows; ++row) sum += of_.row[matrix * of_.shape.rows + row];
      const auto mean = static_cast<float>(sum / static_cast<double>(of_.shape.rows));
      const auto least = static_cast<float>(eps1_);
      means_[matrix] = mean < least ? least : mean;
    }
  }
  void SetSumOfParam(double sum) const { sums_[kOfParam] = sum; }
  void SquareDirection(int64_t first, int64_t count) const {
    const auto run =
        tensor::Select<SquareDirectionBody, const Factors&, int64_t, int64_t, double*>(tensor::CurrentIsa());
    ForChunks(first, count, [&](int64_t at, int64_t n) { run(factors_, at, n, &sums_[kOfDirection]); });
  }
  // Elements [first, first + count) of p.
  void Step(int64_t first, int64_t count, UpdateLog* log, int64_t log_first) const {
    const AdafactorParams& params = of_.params;
    const auto number = static_cast<double>(params.step);
    const auto elements = static_cast<double>(numel());
    const double rms = std::sqrt(sums_[kOfParam]) / std::sqrt(elements);
    const double alpha = std::max(params.eps2, rms) * std::min(params.lr, 1 / std::sqrt(number));
    const double divisor = std::max(1.0, std::sqrt(sums_[kOfDirection]) / (std::sqrt(elements) * params.d));
    const auto decay = static_cast<float>(1 - params.lr * params.weight_decay);
    const auto step = static_cast<float>(alpha / divisor);
    void* const cast =
        of_.cast_dst == nullptr ? nullptr : static_cast<char*>(of_.cast_dst) + first * DTypeSizeBytes(of_.cast_dtype);
    char* const p = static_cast<char*>(of_.p) + first * DTypeSizeBytes(of_.param_dtype);
    tensor::UpdateAndCast(p, of_.param_dtype, cast, of_.cast_dtype, count, [&](int64_t begin, int64_t n) {
      if (log == nullptr) {
        fns_.step(factors_, of_.p, decay, step, first + begin, n);
      } else {
        fns_.logged_step(factors_, of_.p, decay, step, first + begin, n, log,
                         log_first + state_numel() + first + begin);
      }
    });
  }

 private:
  static constexpr int kOfParam = 0, kOfDirection = 1;  // sums of squares

  template <typename Visit>
  static void ForChunks(int64_t first, int64_t count, Visit visit) {
    for (int64_t done = 0; done < count; done += kChunkNumel) visit(first + done, std::min(kChunkNumel, count - done));
  }
  // Elements [first, first + count) of a state, array `array` of the log. A vector's has no sums.
  void State(int array, float* state, const double* sums, int64_t summands, int64_t first, int64_t count,
             UpdateLog* log, int64_t logged) const {
    if (count <= 0) return;
    const auto weight = static_cast<float>(std::pow(static_cast<double>(of_.params.step), of_.params.beta2_decay));
    const auto run = [&](int64_t begin, int64_t n) {
      for (int64_t i = first + begin; i < first + begin + n; ++i) {
        const float g = of_.shape.is_factored ? 0 : of_.g[i] * factors_.scale;
        const float now = of_.shape.is_factored ? static_cast<float>(sums[i] / static_cast<double>(summands)) : g * g;
        state[i] = Lerp(state[i], now, weight);
      }
    };
    if (log == nullptr) {
      run(0, count);
      return;
    }
    RunLogged(
        log, logged, count,
        [&](int64_t i, int64_t n) { log->Save(array, state + first + i, n * static_cast<int64_t>(sizeof(float))); },
        run);
  }

  const AdafactorTensor& of_;
  const ParamFns fns_;
  const double eps1_;
  double* const sums_;
  double* const row_sums_;
  double* const col_sums_;
  double* const means_;
  const Factors factors_;
};

}  // namespace

int64_t AdafactorWorkspaceBytes(const AdafactorShape& shape) {
  const int64_t sums = shape.is_factored ? shape.row_numel() + shape.col_numel() + shape.matrices : 0;
  return (kHeaderDoubles + sums) * static_cast<int64_t>(sizeof(double));
}

double AdafactorCost(const AdafactorShape& shape) { return 32 * static_cast<double>(shape.numel()); }

int64_t AdafactorItems(const AdafactorShape& shape) {
  if (shape.numel() == 0) return 0;
  return 3 * Blocks(shape.numel()) + Blocks(shape.row_numel() + shape.col_numel()) + 1;
}

void RunAdafactorItem(const AdafactorTensor& tensor, int64_t item, UpdateLog* log, int64_t first) {
  const Items items(tensor);
  const auto takes = [&item](int64_t count) {
    if (item < count) return true;
    item -= count;
    return false;
  };
  const int64_t blocks = Blocks(items.numel()), state_blocks = Blocks(items.state_numel());
  const auto count = [&item](int64_t numel) { return std::min(kItemNumel, numel - item * kItemNumel); };
  if (takes(blocks)) return items.Sums(item * kItemNumel, count(items.numel()));
  if (takes(state_blocks)) return items.States(item * kItemNumel, count(items.state_numel()), log, first);
  if (takes(1)) return items.Means(log);
  if (takes(blocks)) return items.SquareDirection(item * kItemNumel, count(items.numel()));
  items.Step(item * kItemNumel, count(items.numel()), log, first);
}

void RunAdafactorFrom(const AdafactorTensor& tensor, int64_t done, UpdateLog* log, int64_t first) {
  const Items items(tensor);
  const int64_t numel = items.numel(), states = items.state_numel();
  if (done >= states + numel) return;
  const auto in_items = [](int64_t from, int64_t end, auto run) {
    for (; from < end; from += kItemNumel) run(from, std::min(kItemNumel, end - from));
  };
  if (done <= states) {
    in_items(0, numel, [&](int64_t at, int64_t count) { items.Sums(at, count); });
  } else {
    items.SetSumOfParam(log->remembered());
  }
  if (done < states) items.States(done, states - done, log, first);
  items.Means(log);
  in_items(0, numel, [&](int64_t at, int64_t count) { items.SquareDirection(at, count); });
  const int64_t stepped = std::max<int64_t>(0, done - states);
  items.Step(stepped, numel - stepped, log, first);
}

}  // namespace shardd
