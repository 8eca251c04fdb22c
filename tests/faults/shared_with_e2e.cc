// The cluster and the trainer of tests/e2e, built into this binary too: ranks are processes of the binary that starts
// them.
#include "tests/e2e/cluster.cc"              // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/nodes/nodes.cc"          // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/bits.cc"           // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/blocks.cc"         // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/device_values.cc"  // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/moments.cc"        // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/report.cc"         // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/step_limit.cc"     // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/trainer.cc"        // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/trainer_load.cc"   // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/ranks/trainer_pass.cc"   // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/resident.cc"             // NOLINT(bugprone-suspicious-include)
