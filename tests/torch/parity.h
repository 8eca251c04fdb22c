#ifndef SHARDD_TESTS_TORCH_PARITY_H_
#define SHARDD_TESTS_TORCH_PARITY_H_

// Results of workers beside those of the unsharded run.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <vector>

namespace shardd_test {

// Relative. Exact steps come first: as long as no rounding to bfloat16 has fallen the other way, nothing differs.
struct Tolerance {
  double exact = 1e-5;
  size_t exact_steps = 0;
  double losses = 1e-5;
  double parameters = 1e-5;
};
inline constexpr Tolerance kFloat32;
// One rounding of an output (2^-8 of about one) moves a squared error of about 0.6^2 by 1.3 %.
inline constexpr Tolerance kBfloat16{.exact_steps = 10, .losses = 1.0 / 64, .parameters = 1.0 / 128};

// By rank: losses of each step, the evaluation's and all parameters.
void ExpectParity(const std::vector<nlohmann::json>& sharded, const nlohmann::json& reference,
                  const Tolerance& tolerance);

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_PARITY_H_
