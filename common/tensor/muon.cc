#include "common/tensor/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"
#include "common/tensor/logged_blocks.h"
#include "common/tensor/matmul.h"
#include "common/tensor/trainable_internal.h"
#include "common/tensor/update_and_cast_internal.h"
#include "common/tensor/update_log.h"

namespace shardd {
namespace {

constexpr int64_t kItemNumel = int64_t{1} << 18;  // of a pass over elements
constexpr int64_t kRowAlignment = 16;             // floats: rows of the workspace begin on cache lines
constexpr int64_t kHeaderFloats = 16;

SHARDD_ALWAYS_INLINE float RoundToBf16(float x) { return tensor::Bf16ToFloat(tensor::FloatToBf16(x)); }

// torch.lerp, in its order: x + weight * (y - x), from the nearer end.
struct Lerp {
  float weight;
  float rest;  // 1 - weight
  explicit Lerp(double of) : weight(static_cast<float>(of)), rest(1 - weight) {}
  bool from_start() const { return (weight < 0 ? -weight : weight) < 0.5f; }
};

int64_t Blocks(int64_t numel, int64_t of) { return (numel + of - 1) / of; }

// X is m x n with m <= n.
struct Shape {
  Shape(int64_t rows, int64_t cols)
      : m(std::min(rows, cols)),
        n(std::max(rows, cols)),
        numel(rows * cols),
        x_stride(Blocks(n, kRowAlignment) * kRowAlignment),
        g_stride(Blocks(m, kRowAlignment) * kRowAlignment),
        // A tile's product takes about a millisecond: the longer its sums, the smaller it is.
        edge(n <= 256    ? 256
             : n <= 1024 ? 128
                         : 64),
        row_tiles(Blocks(m, edge)),
        col_tiles(Blocks(n, edge)),
        blocks(Blocks(numel, kItemNumel)),
        block_rows(std::max<int64_t>(1, kItemNumel / n)) {}
  int64_t symmetric_tiles() const { return row_tiles * (row_tiles + 1) / 2; }
  const int64_t m, n, numel, x_stride, g_stride, edge, row_tiles, col_tiles, blocks, block_rows;
};

// The parts of the workspace: |X|, X and what becomes X, X X^T and what is made of it.
struct Workspace {
  Workspace(const Shape& of, float* begin)
      : norm(begin),
        x{begin + kHeaderFloats, begin + kHeaderFloats + of.m * of.x_stride},
        gram(x[1] + of.m * of.x_stride),
        polynomial(gram + of.m * of.g_stride) {}
  float* const norm;
  float* const x[2];
  float* const gram;
  float* const polynomial;
};

struct MomentumBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* grad, float* state, float grad_scale, Lerp lerp, int64_t numel) {
    const float* __restrict g = grad;
    float* __restrict buf = state;
    if (lerp.from_start()) {
      SHARDD_NO_ALIAS
      for (int64_t i = 0; i < numel; ++i) buf[i] = buf[i] + lerp.weight * (g[i] * grad_scale - buf[i]);
    } else {
      SHARDD_NO_ALIAS
      for (int64_t i = 0; i < numel; ++i) {
        const float scaled = g[i] * grad_scale;
        buf[i] = scaled - (scaled - buf[i]) * lerp.rest;
      }
    }
  }
};

struct LoggedMomentumBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* grad, float* state, float grad_scale, Lerp lerp, int64_t numel,
                                       UpdateLog* log, int64_t first) {
    RunLogged(
        log, first, numel,
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { log->Save(1, state + i, count * static_cast<int64_t>(sizeof(float))); },
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { MomentumBody::Run(grad + i, state + i, grad_scale, lerp, count); });
  }
};

// decay * p - step * x
template <typename Param>
struct StepBody {
  static SHARDD_ALWAYS_INLINE void Run(void* param, const float* direction, float decay, float step, int64_t numel) {
    auto* __restrict p = static_cast<typename Param::Storage*>(param);
    const float* __restrict x = direction;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) p[i] = Param::Store(Param::Load(p[i]) * decay - step * x[i]);
  }
};

template <typename Param>
struct LoggedStepBody {
  static SHARDD_ALWAYS_INLINE void Run(void* param, const float* direction, float decay, float step, int64_t numel,
                                       UpdateLog* log, int64_t first) {
    auto* const p = static_cast<typename Param::Storage*>(param);
    RunLogged(
        log, first, numel,
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { log->Save(0, p + i, count * static_cast<int64_t>(sizeof(*p))); },
        [&](int64_t i, int64_t count)
            __attribute__((always_inline)) { StepBody<Param>::Run(p + i, direction + i, decay, step, count); });
  }
};

using StepFn = void (*)(void*, const float*, float, float, int64_t);
using LoggedStepFn = void (*)(void*, const float*, float, float, int64_t, UpdateLog*, int64_t);
struct StepFns {
  StepFn plain;
  LoggedStepFn logged;
};

template <typename Param>
StepFns SelectStepOf() {
  const tensor::Isa isa = tensor::CurrentIsa();
  return {tensor::Select<StepBody<Param>, void*, const float*, float, float, int64_t>(isa),
          tensor::Select<LoggedStepBody<Param>, void*, const float*, float, float, int64_t, UpdateLog*, int64_t>(isa)};
}

StepFns SelectStep(DType dtype) {
  return tensor::WithTrainable(dtype, "Muon update of", [](auto param) { return SelectStepOf<decltype(param)>(); });
}

// out = bf16(addend_factor * addend + factor * out)
struct CombineBody {
  static SHARDD_ALWAYS_INLINE void Run(float* sums, const float* addend, float addend_factor, float factor,
                                       int64_t numel) {
    float* __restrict out = sums;
    const float* __restrict add = addend;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) out[i] = RoundToBf16(addend_factor * add[i] + factor * out[i]);
  }
};

struct RoundBody {
  static SHARDD_ALWAYS_INLINE void Run(float* values, float divisor, int64_t numel) {
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) values[i] = RoundToBf16(values[i] / divisor);
  }
};

// One matrix's update, item by item.
class Items {
 public:
  explicit Items(const MuonMatrix& of) : of_(of), shape_(of.rows, of.cols), at_(shape_, of.workspace) {}

  // Elements [first, first + count) of buf.
  void Momentum(int64_t first, int64_t count, UpdateLog* log, int64_t log_first) const {
    const float* const g = of_.g + first;
    float* const buf = of_.buf + first;
    const auto scale = static_cast<float>(of_.params.grad_scale);
    const Lerp lerp(1 - of_.params.momentum);
    const tensor::Isa isa = tensor::CurrentIsa();
    if (log == nullptr) {
      tensor::Select<MomentumBody, const float*, float*, float, Lerp, int64_t>(isa)(g, buf, scale, lerp, count);
    } else {
      tensor::Select<LoggedMomentumBody, const float*, float*, float, Lerp, int64_t, UpdateLog*, int64_t>(isa)(
          g, buf, scale, lerp, count, log, log_first + first);
    }
  }
  // Elements [first, first + count) of p.
  void Step(int64_t first, int64_t count, UpdateLog* log, int64_t log_first) const {
    const MuonParams& params = of_.params;
    const double ratio = static_cast<double>(of_.rows) / static_cast<double>(of_.cols);
    const double adjusted =
        params.match_rms_adamw ? 0.2 * std::sqrt(static_cast<double>(shape_.n)) : std::sqrt(std::max(1.0, ratio));
    const auto decay = static_cast<float>(1 - params.lr * params.weight_decay);
    const auto step = static_cast<float>(params.lr * adjusted);
    const StepFns fns = SelectStep(of_.param_dtype);
    const int64_t bytes = DTypeSizeBytes(of_.param_dtype);
    void* const cast =
        of_.cast_dst == nullptr ? nullptr : static_cast<char*>(of_.cast_dst) + first * DTypeSizeBytes(of_.cast_dtype);
    char* const p = static_cast<char*>(of_.p) + first * bytes;
    const float* const x = Result() + first;
    tensor::UpdateAndCast(p, of_.param_dtype, cast, of_.cast_dtype, count, [&](int64_t begin, int64_t n) {
      if (log == nullptr) {
        fns.plain(p + begin * bytes, x + begin, decay, step, n);
      } else {
        fns.logged(p + begin * bytes, x + begin, decay, step, n, log, log_first + shape_.numel + first + begin);
      }
    });
  }
  // Everything between the two. Item `item` of these; false: there are not so many.
  bool Between(int64_t item) const {
    if (Takes(shape_.blocks, &item)) {
      Begin(item * kItemNumel, std::min(kItemNumel, shape_.numel - item * kItemNumel));
      return true;
    }
    if (Takes(1, &item)) {
      Measure();
      return true;
    }
    const int64_t row_blocks = Blocks(shape_.m, shape_.block_rows);
    if (Takes(row_blocks, &item)) {
      Normalize(item * shape_.block_rows, std::min(shape_.m, (item + 1) * shape_.block_rows));
      return true;
    }
    const int64_t products = 2 * shape_.symmetric_tiles() + shape_.row_tiles * shape_.col_tiles;
    const int64_t step = item / products;
    if (step < of_.params.ns_steps) {
      Product(static_cast<int>(step), item % products);
      return true;
    }
    item -= of_.params.ns_steps * products;
    if (!Takes(shape_.blocks, &item)) return false;
    Unpack(item * kItemNumel, std::min(kItemNumel, shape_.numel - item * kItemNumel));
    return true;
  }
  const Shape& shape() const { return shape_; }

 private:
  static bool Takes(int64_t count, int64_t* item) {
    if (*item < count) return true;
    *item -= count;
    return false;
  }
  float* X(int step) const { return at_.x[step % 2]; }
  // X as p lies, without gaps, where the last step did not leave it.
  float* Result() const { return X(of_.params.ns_steps + 1); }

  // Calls visit(element of p, address in x), by runs of p's rows.
  template <typename Visit>
  void ForElements(float* x, int64_t first, int64_t count, Visit visit) const {
    const bool transposed = of_.rows > of_.cols;
    for (int64_t i = first; i < first + count;) {
      const int64_t row = i / of_.cols, begin = i % of_.cols;
      const int64_t end = std::min(of_.cols, begin + first + count - i);
      for (int64_t col = begin; col < end; ++col, ++i) {
        visit(i, x + (transposed ? col * shape_.x_stride + row : row * shape_.x_stride + col));
      }
    }
  }
  void Begin(int64_t first, int64_t count) const {
    const Lerp lerp(of_.params.momentum);
    const bool nesterov = of_.params.nesterov, from_start = lerp.from_start();
    const auto scale = static_cast<float>(of_.params.grad_scale);
    ForElements(X(0), first, count, [&](int64_t i, float* x) {
      const float buf = of_.buf[i];
      const float g = of_.g[i] * scale;
      const float mixed = from_start ? g + lerp.weight * (buf - g) : buf - (buf - g) * lerp.rest;
      *x = RoundToBf16(nesterov ? mixed : buf);
    });
  }
  void Measure() const {
    double sum = 0;
    for (int64_t row = 0; row < shape_.m; ++row) sum += SquaredNorm(X(0) + row * shape_.x_stride, shape_.n);
    const float norm = RoundToBf16(static_cast<float>(std::sqrt(sum)));
    const float least = RoundToBf16(static_cast<float>(of_.params.eps));
    *at_.norm = norm < least ? least : norm;  // not a number stays one
  }
  void Normalize(int64_t first_row, int64_t end_row) const {
    const auto run = tensor::Select<RoundBody, float*, float, int64_t>(tensor::CurrentIsa());
    for (int64_t row = first_row; row < end_row; ++row) run(X(0) + row * shape_.x_stride, *at_.norm, shape_.n);
  }
  // A tile of one of the three products of a step.
  void Product(int step, int64_t tile) const {
    if (Takes(shape_.symmetric_tiles(), &tile)) {
      SymmetricTile(tile, {X(step), shape_.x_stride}, shape_.n, nullptr, 0, 1, at_.gram);
      return;
    }
    if (Takes(shape_.symmetric_tiles(), &tile)) {
      SymmetricTile(tile, {at_.gram, shape_.g_stride}, shape_.m, at_.gram, static_cast<float>(of_.params.b),
                    static_cast<float>(of_.params.c), at_.polynomial);
      return;
    }
    const int64_t row = tile / shape_.col_tiles * shape_.edge, col = tile % shape_.col_tiles * shape_.edge;
    const int64_t rows = std::min(shape_.edge, shape_.m - row), cols = std::min(shape_.edge, shape_.n - col);
    const int64_t at = row * shape_.x_stride + col;
    MatMul({at_.polynomial + row * shape_.g_stride, shape_.g_stride}, {X(step) + col, shape_.x_stride},
           /*b_transposed=*/false, X(step + 1) + at, shape_.x_stride, rows, cols, shape_.m);
    Combine(X(step + 1) + at, X(step) + at, shape_.x_stride, static_cast<float>(of_.params.a), 1, rows, cols);
  }
  // out = bf16(addend_factor * addend + factor * a a^T): one tile on or above the diagonal, and its mirror image.
  void SymmetricTile(int64_t tile, MatrixView a, int64_t k, const float* addend, float addend_factor, float factor,
                     float* out) const {
    int64_t i = 0;
    while (!Takes(shape_.row_tiles - i, &tile)) ++i;
    const int64_t row = i * shape_.edge, col = (i + tile) * shape_.edge;
    const int64_t rows = std::min(shape_.edge, shape_.m - row), cols = std::min(shape_.edge, shape_.m - col);
    const int64_t stride = shape_.g_stride, at = row * stride + col;
    MatMul({a.data + row * a.stride, a.stride}, {a.data + col * a.stride, a.stride}, /*b_transposed=*/true, out + at,
           stride, rows, cols, k);
    if (addend == nullptr) {
      const auto run = tensor::Select<RoundBody, float*, float, int64_t>(tensor::CurrentIsa());
      for (int64_t r = 0; r < rows; ++r) run(out + at + r * stride, 1, cols);
    } else {
      Combine(out + at, addend + at, stride, addend_factor, factor, rows, cols);
    }
    for (int64_t r = 0; r < rows; ++r) {
      // The lower half of a tile on the diagonal is the upper one's image, too.
      for (int64_t c = tile == 0 ? r + 1 : 0; c < cols; ++c)
        out[(col + c) * stride + row + r] = out[at + r * stride + c];
    }
  }
  static void Combine(float* sums, const float* addend, int64_t stride, float addend_factor, float factor, int64_t rows,
                      int64_t cols) {
    const auto run = tensor::Select<CombineBody, float*, const float*, float, float, int64_t>(tensor::CurrentIsa());
    for (int64_t r = 0; r < rows; ++r) run(sums + r * stride, addend + r * stride, addend_factor, factor, cols);
  }
  void Unpack(int64_t first, int64_t count) const {
    float* const to = Result();
    ForElements(X(of_.params.ns_steps), first, count, [&](int64_t i, const float* x) { to[i] = *x; });
  }

  const MuonMatrix& of_;
  const Shape shape_;
  const Workspace at_;
};

int64_t ItemsBetween(const Shape& shape, int ns_steps) {
  return 2 * shape.blocks + 1 + Blocks(shape.m, shape.block_rows) +
         ns_steps * (2 * shape.symmetric_tiles() + shape.row_tiles * shape.col_tiles);
}

}  // namespace

int64_t MuonWorkspaceBytes(int64_t rows, int64_t cols) {
  if (rows == 0 || cols == 0) return 0;
  const Shape shape(rows, cols);
  return static_cast<int64_t>(sizeof(float)) *
         (kHeaderFloats + 2 * shape.m * shape.x_stride + 2 * shape.m * shape.g_stride);
}

double MuonCost(int64_t rows, int64_t cols, int ns_steps) {
  const auto m = static_cast<double>(std::min(rows, cols)), n = static_cast<double>(std::max(rows, cols));
  return 16 * m * n + ns_steps * (1.5 * m * m * n + 0.5 * m * m * m);
}

int64_t MuonItems(int64_t rows, int64_t cols, int ns_steps) {
  if (rows == 0 || cols == 0) return 0;
  const Shape shape(rows, cols);
  return 2 * shape.blocks + ItemsBetween(shape, ns_steps);
}

void RunMuonItem(const MuonMatrix& matrix, int64_t item, UpdateLog* log, int64_t first) {
  const Items items(matrix);
  const Shape& shape = items.shape();
  const auto count = [&](int64_t block) { return std::min(kItemNumel, shape.numel - block * kItemNumel); };
  if (item < shape.blocks) {
    items.Momentum(item * kItemNumel, count(item), log, first);
    return;
  }
  item -= shape.blocks;
  if (items.Between(item)) return;
  item -= ItemsBetween(shape, matrix.params.ns_steps);
  items.Step(item * kItemNumel, count(item), log, first);
}

void RunMuonFrom(const MuonMatrix& matrix, int64_t done, UpdateLog* log, int64_t first) {
  const Items items(matrix);
  const int64_t numel = items.shape().numel;
  if (done >= 2 * numel) return;
  if (done < numel) items.Momentum(done, numel - done, log, first);
  for (int64_t item = 0; items.Between(item); ++item) {
  }
  const int64_t stepped = std::max<int64_t>(0, done - numel);
  items.Step(stepped, numel - stepped, log, first);
}

}  // namespace shardd
