#ifndef SHARDD_TESTS_E2E_RANKS_MOMENTS_H_
#define SHARDD_TESTS_E2E_RANKS_MOMENTS_H_

// Named moments of a rank's life, at which its arguments may stop or end it:
//   kill=MOMENT@STEP     SIGKILL to itself there; with kill_late_us=N so long after it, whatever it does then
//   pause=MOMENT@STEP    says "at.MOMENT.RANK" in its folder and goes on when "go.MOMENT.RANK" is there
//   mark=MOMENT@STEP     says "at.MOMENT.RANK" with the time (NowMs) and goes on
//   kill_after_us=N      SIGKILL that long after its start, whatever it does then
// Without @STEP: at every step. Several: MOMENT@STEP,MOMENT.

#include <cstdint>
#include <string>

#include "tests/e2e/ranks/args.h"

namespace shardd::e2e {

class Moments {
 public:
  // `args` outlives this. Starts the clock of kill_after_us.
  explicit Moments(const Args& args);
  void Reach(const std::string& name, int64_t step) const;
  // Whether an argument `what`=NAME@STEP says so.
  bool At(const std::string& what, const std::string& name, int64_t step) const;

 private:
  std::string File(const std::string& prefix, const std::string& name) const;

  const Args& args_;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_MOMENTS_H_
