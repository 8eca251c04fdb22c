#ifndef SHARDD_COMMON_TENSOR_NORM_H_
#define SHARDD_COMMON_TENSOR_NORM_H_

// The norm of many pieces: (sum |x|^p)^(1/p), or the largest |x| for infinite p. This header decides the numerics: in
// double throughout, over fixed blocks of 4096 elements, pieces added in the given order.
// - p 1, 2, 3 and 4: sums of powers. No power of an fp32 number overflows or vanishes in double.
// - infinite: exact.
// - any other p: sums powers of |x| / s, where s is the largest |x| so far, and rescales the sum when s grows; so
//   neither overflow nor underflow occurs, however large p is. Uses std::pow: within a few ulp between machines, equal
//   on one.
// A NaN makes the value NaN; an infinity without a NaN makes it infinite.

#include <cstdint>

namespace shardd {

// What a Norm has added so far, as plain data, from which a kernel of another device can continue. Orders 1 to 4: scale
// is 1, sum is the sum of |x|^p. Infinite: scale is the largest |x|. Others: scale is the largest |x|, sum is in units
// of scale^p. All zero: nothing yet.
struct NormState {
  double scale;
  double sum;
};

// Thread-compatible; a copy is independent.
class Norm {
 public:
  // True above 0, infinity included.
  static bool IsOrder(double p);
  explicit Norm(double p = 2) : p_(p) {}  // REQUIRES: IsOrder(p)
  double order() const { return p_; }
  void Add(const float* src, int64_t numel);
  void Add(const Norm& other);  // REQUIRES: the same order
  double value() const;
  NormState state() const { return {scale_, sum_}; }
  void set_state(const NormState& state);  // REQUIRES: that of a norm of the same order

 private:
  void AddScaled(double scale, double sum);

  double p_;
  double scale_ = 0;  // as in NormState
  double sum_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_NORM_H_
