// What the daemon takes from the words of a client's page, and what it does not.

#include "common/shm/page.h"
#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

class SessionWordsTest : public GradientsTest {
 protected:
  ClientPage& Page(int rank) {
    ClientPage* page = nullptr;
    OnLoop([&] { page = job_->sessions()[rank].get()->memory()->memory->At<ClientPage>(0); });
    return *page;
  }
  bool HasDone(int rank, uint64_t done) {
    bool result = false;
    OnLoop([&] { result = job_->sessions()[rank].get()->words().HasDone(done); });
    return result;
  }
};

TEST_F(SessionWordsTest, ASignalCountsInItsEpochAlone) {
  EXPECT_TRUE(HasDone(0, 0));
  EXPECT_FALSE(HasDone(0, 1));
  Page(0).done = TimelineValue(epoch(), 2);
  EXPECT_TRUE(HasDone(0, 2));
  EXPECT_FALSE(HasDone(0, 3));
  Page(0).done = TimelineValue(epoch() + 1, 9);
  EXPECT_FALSE(HasDone(0, 2));
}

TEST_F(SessionWordsTest, NoSignalBehindAnAbandonedWaitCounts) {
  Page(0).done = TimelineValue(epoch(), 2);
  Page(0).is_void = 1;
  EXPECT_FALSE(HasDone(0, 2));
  EXPECT_FALSE(HasDone(0, 1)) << "also what came before may be read by then";
  EXPECT_TRUE(HasDone(0, 0)) << "what is behind no signal waits for none";
  Page(1).done = TimelineValue(epoch(), 1);
  EXPECT_TRUE(HasDone(1, 1));
}

}  // namespace
}  // namespace shardd
