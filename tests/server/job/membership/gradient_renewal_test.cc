#include "server/job/membership/gradient_renewal.h"

#include <unistd.h>

#include "server/device/device.h"
#include "server/device/devices.h"
#include "server/job/epoch_end.h"
#include "server/job/job_events.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/write_undo.h"
#include "server/observe/events.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/tenant/tenant.h"
#include "tests/server/job/facts_fixture.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class GradientRenewalTest : public FactsTest {
 protected:
  GradientRenewalTest() {
    auto memory = JobMemory::Create(*plan_, "job");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    job_.when_failed = [this] {
      for (int rank = 0; rank < 2; ++rank) (void)sessions_.Take(rank);
    };
    renewal_ = std::make_unique<GradientRenewal>(
        GradientRenewal::Facts{plan_.get(), &sessions_, &decision_, &undo_, &end_, [this] { return promised_; }},
        GradientRenewal::Services{memory_.get(), &work_, &devices_, &maker_, &events_, &job_,
                                  [this](absl::AnyInvocable<void()> closure) { loop_.Post(std::move(closure)); },
                                  [this] { ++renewed_; }});
    auto session = Session::Create(plan_, /*id=*/9, /*rank=*/1, /*epoch=*/1);
    EXPECT_TRUE(session.ok()) << session.status();
    (*session)->peer.pid = stopped_.pid();
    renewal_->EpochEnded(**session);
  }
  // Behind what frees old shards, which a job would be kept for: it goes from the copier to devices and comes back.
  ~GradientRenewalTest() override {
    for (int hop = 0; hop < 2; ++hop) loop_.RunAndWait([] {});
    for (const auto& device : made_.devices) device->Shutdown();
    loop_.RunAndWait([] {});
    maker_.Stop();
  }
  absl::Status TryAttach() {
    absl::Status status;
    loop_.RunAndWait([&] { status = renewal_->MayAttach("attach: ", /*rank=*/1, getpid(), UniqueFd(), false); });
    return status;
  }
  void AwaitMade() {
    maker_.RunAndWait([] {});
    loop_.RunAndWait([] {});
  }
  static void ExpectLater(const absl::Status& status, const std::string& why) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }

  const Devices made_ = *MakeDevices("cpu:2");
  OptimizerDevices devices_{{made_.devices[0].get(), made_.devices[1].get()}, 2};
  EventLog log_;
  JobEvents events_{"job", Tenant{}, &committed_, &log_};
  CoreLoop maker_;
  WriteUndo undo_;
  EpochEnd end_{/*commits=*/nullptr, /*nodes=*/nullptr};
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<GradientRenewal> renewal_;
  bool promised_ = false;
  int renewed_ = 0;
  testing::Child stopped_{[] {
    pause();
    return 0;
  }};
};

TEST_F(GradientRenewalTest, ARankBesideAnEarlierProcessAttachesToNewShards) {
  const JobSlab* old = memory_->gradients();
  ExpectLater(TryAttach(), "new ones are being made");
  AwaitMade();
  EXPECT_EQ(renewed_, 1);
  EXPECT_NE(memory_->gradients(), old);
  EXPECT_TRUE(TryAttach().ok());
  EXPECT_EQ(renewal_->writers().left(), nullptr) << "the host's are free at once";
}

TEST_F(GradientRenewalTest, WhoeverHasASessionBeginsAnew) {
  Attach(0);
  ExpectLater(TryAttach(), "new ones are being made");
  EXPECT_THAT(std::string(job_.failure().message()), HasSubstr("all ranks begin anew with new ones"));
  AwaitMade();
}

TEST_F(GradientRenewalTest, NothingIsMadeWhileGradientsAreUsed) {
  work_.BeginGradientWork();
  ExpectLater(TryAttach(), "work on them is under way");
  work_.EndGradientWork();
  promised_ = true;
  ExpectLater(TryAttach(), "work on them is under way");
  promised_ = false;
  decision_.BeginCommit();
  ExpectLater(TryAttach(), "work on them is under way");
  AwaitMade();
  EXPECT_EQ(renewed_, 0);
}

TEST_F(GradientRenewalTest, AJobThatIsClosedKeepsItsShards) {
  const JobSlab* old = memory_->gradients();
  loop_.RunAndWait([&] {
    (void)renewal_->MayAttach("attach: ", /*rank=*/1, getpid(), UniqueFd(),
                              /*replace=*/false);
    end_.Close();  // before the loop hears of new ones
  });
  AwaitMade();
  EXPECT_EQ(memory_->gradients(), old);
  EXPECT_EQ(renewed_, 0);
}

TEST_F(GradientRenewalTest, WhatAnAnswerAsksForIsMade) {
  AttachAnswer answer;
  answer.renew = "sums are under way";
  loop_.RunAndWait([&] { ExpectLater(renewal_->Settle("attach: ", 0, answer), "attach: sums are under way"); });
  answer.renew.clear();
  loop_.RunAndWait([&] { EXPECT_TRUE(renewal_->Settle("attach: ", 0, answer).ok()); });
  AwaitMade();
  EXPECT_EQ(renewed_, 1);
}

}  // namespace
}  // namespace shardd
