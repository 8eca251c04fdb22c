// The cluster and the trainer of tests/e2e, built into this binary too: ranks are processes of the binary that starts
// them.
#include "tests/e2e/blocks.cc"         // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/cluster.cc"        // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/device_values.cc"  // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/moments.cc"        // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/nodes.cc"          // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/report.cc"         // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/resident.cc"       // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/trainer.cc"        // NOLINT(bugprone-suspicious-include)
#include "tests/e2e/trainer_pass.cc"   // NOLINT(bugprone-suspicious-include)
