// Parts of a step over two nodes that are taken back, behind other jobs' copies: nobody meets half of the old bytes.

#include <unistd.h>

#include "server/job/nodes/state_transfers.h"
#include "server/storage/job_memory.h"
#include "server/storage/undo_slab.h"
#include "tests/server/job/held_copier.h"
#include "tests/server/job/parts_over_nodes.h"

namespace shardd {
namespace {

class JobNodesPartsUndo : public PartsOverNodes {
 protected:
  HeldCopier held_copier_{&copier_};
};

TEST_P(JobNodesPartsUndo, NobodyComesBeforeAllIsBackHoweverManyEpochsEnd) {
  PauseBetweenParts();
  held_copier_.Hold();
  for (const bool up : {false, true, false, true}) {
    wire_.SetUp(0, 1, up);
    ASSERT_TRUE(Gone(0) && Gone(1));
    EXPECT_FALSE(TryAttach(0).ok());
  }
  EXPECT_EQ(At(0, 0), -2) << "nothing is back yet";
  held_copier_.LetGo();
  ExpectAllBackAt(1);
}

// A node that is sent another's state may begin again at a version whose old bytes it has kept.
TEST_P(JobNodesPartsUndo, WhoseStateIsLostForgetsOldBytes) {
  Begin();
  StepAll(1);
  // "w" was changed by the first part.
  const auto has_old_bytes = [this] { return job(0).memory().undo()->Has(1); };
  ASSERT_TRUE(Until(has_old_bytes));
  OnLoop([&] { const_cast<StateTransfers&>(job(0).nodes().states()).NodeBeginFetch(1, /*transfer=*/7); });
  EXPECT_TRUE(Until([&] { return !has_old_bytes(); }));
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesPartsUndo, ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                         PartsName);

class JobReplicasPartsUndo : public JobNodesPartsUndo {};

// Its rank is lost as well, and the end of its epoch waits for node 0.
TEST_P(JobReplicasPartsUndo, ANewNode0IsSentNothingThatIsNotBack) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Promises(1));
  wire_.Drop([](int to, const v1::PeerMessage&) { return to == 0; });
  Lose(1);
  Kill(0);
  wire_.Drop([this](int to, const v1::PeerMessage& message) {
    if (to == 1 && message.has_fetch())
      held_copier_.Hold();  // before node 1 hears it; node 0 asks behind copies of its own
    return false;
  });
  OpenAgain(0);
  ASSERT_TRUE(Until([&] { return !job(1).nodes().promised(); })) << Why(1);
  EXPECT_FALSE(testing::PollUntil([&] { return job(0).committed().version() != 0; }, absl::Milliseconds(300)));
  held_copier_.LetGo();
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == 2; })) << Why(1);
  AttachAll();
  ExpectAll(-1, -1);
  StepAll(2);
}

INSTANTIATE_TEST_SUITE_P(All, JobReplicasPartsUndo, ::testing::Values(v1::STRATEGY_HYBRID_SHARD));

}  // namespace
}  // namespace shardd
