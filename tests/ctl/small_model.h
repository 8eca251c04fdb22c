#ifndef SHARDD_TESTS_CTL_SMALL_MODEL_H_
#define SHARDD_TESTS_CTL_SMALL_MODEL_H_

namespace shardd::ctl {

// A shardd.v1.JobSpec with one parameter group, "hidden", of 4 MiB.
inline constexpr char kSmallModel[] = R"({
  "name": "small",
  "tree": {"modules": [
    {"parent": -1, "className": "Net"},
    {"parent": 0, "name": "hidden", "className": "Linear", "parameters": [
      {"name": "weight", "shape": [1024, 1024], "dtype": "DTYPE_FLOAT32", "requiresGrad": true}]}]},
  "policy": {"classes": {"classNames": ["Linear"]}},
  "config": {"optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"}, "trainersNeverWrite": true}
})";

}  // namespace shardd::ctl

#endif  // SHARDD_TESTS_CTL_SMALL_MODEL_H_
