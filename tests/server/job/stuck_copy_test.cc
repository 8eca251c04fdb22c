// A copy of values that never ends, because a GPU's driver does not return: its own job is closed, others on the same
// GPU train on, and their copies wait for the copier that is stuck.

#include <sys/mman.h>

#include <cstring>
#include <optional>

#include "gmock/gmock.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

// Memory of a "GPU" that is the host's. While it is held, no copy between it and the host returns.
class HeldMemory final : public DeviceMemory {
 public:
  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  void LetGo() {
    absl::MutexLock lock(&mutex_);
    held_ = false;
  }
  bool Stuck() const {
    absl::MutexLock lock(&mutex_);
    return stuck_ > 0;
  }

  const std::string& device() const override { return name_; }
  const std::string& device_uuid() const override { return name_; }
  std::string backing() const override { return name_; }
  int max_reduce_sources() const override { return 8; }
  absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSlab(const std::string& name, int64_t size_bytes,
                                                       const std::vector<DeviceMemory*>& users) override {
    return MakeSpreadSlab(name, {{this, size_bytes}}, users);
  }
  absl::StatusOr<std::unique_ptr<DeviceSlab>> MakeSpreadSlab(const std::string&, const std::vector<Part>& parts,
                                                             const std::vector<DeviceMemory*>&) override {
    return std::make_unique<OnHost>(parts);
  }
  absl::StatusOr<std::unique_ptr<PinnedMemory>> RegisterHost(const std::string&, void*, int64_t,
                                                             const std::vector<DeviceMemory*>&) override {
    return absl::UnimplementedError("not in this test");
  }
  absl::StatusOr<int64_t> PageBytes() const override { return 4096; }
  absl::Status Write(char* to, const void* from, int64_t size_bytes) override {
    Call();
    std::memcpy(to, from, static_cast<size_t>(size_bytes));
    return absl::OkStatus();
  }
  absl::Status Read(void* to, const char* from, int64_t size_bytes) override {
    Call();
    std::memcpy(to, from, static_cast<size_t>(size_bytes));
    return absl::OkStatus();
  }
  absl::Status Zero(char* to, int64_t size_bytes) override {
    Call();
    std::memset(to, 0, static_cast<size_t>(size_bytes));
    return absl::OkStatus();
  }
  absl::Status Copy(const std::vector<Copied>&) override { return absl::UnimplementedError("not in this test"); }

 private:
  class OnHost final : public DeviceSlab {
   public:
    explicit OnHost(const std::vector<Part>& parts) {
      for (const Part& part : parts) {
        pieces_.push_back({part.on, part.size_bytes, -1});
        size_bytes_ += part.size_bytes;
      }
      data_ = static_cast<char*>(
          mmap(nullptr, static_cast<size_t>(size_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    ~OnHost() override { munmap(data_, static_cast<size_t>(size_bytes_)); }
    char* data() const override { return data_; }
    int64_t size_bytes() const override { return size_bytes_; }
    const std::vector<Piece>& pieces() const override { return pieces_; }

   private:
    std::vector<Piece> pieces_;
    int64_t size_bytes_ = 0;
    char* data_ = nullptr;
  };

  void Call() {
    absl::MutexLock lock(&mutex_);
    ++stuck_;
    mutex_.Await(absl::Condition(
        +[](bool* held) { return !*held; }, &held_));
    --stuck_;
  }

  const std::string name_ = "cuda:0";
  mutable absl::Mutex mutex_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  int stuck_ ABSL_GUARDED_BY(mutex_) = 0;
};

SpecBuilder OnlyTheDaemonWrites() {
  SpecBuilder builder(2);
  builder.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  builder.config().set_trainers_never_write(true);
  builder.Param(0, "w", {64});
  return builder;
}

// A job with verbs.
class OnGpu : public JobCoreTest {
 public:
  OnGpu(HeldMemory* memory, CoreLoop* copier)
      : JobCoreTest(OnlyTheDaemonWrites(), /*copies_off_loop=*/true, copier, SlabPlace{memory, {memory}}) {}
  void TestBody() override {}

  void EnterWithWriteback() {
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, command);
  }
  // Rank 0's.
  void Write(float value) {
    v1::Command command;
    OnLoop([&] {
      Session* const session = job_->session(0);
      const int64_t staging = session->layout().payload_offset_bytes;
      std::memcpy(session->memory()->memory->At<char>(staging), &value, sizeof(value));
      command.mutable_write_parameters()->set_numel(1);
      command.mutable_write_parameters()->set_staging_offset_bytes(staging);
    });
    Send(0, command);
  }
  bool Held() {
    bool held = false;
    OnLoop([&] { held = job_->session(0)->held; });
    return held;
  }
  // Whether it is closed when so much time has passed.
  bool ClosedAfter(absl::Duration time) {
    bool closed = false;
    OnLoop([&] {
      job_->CheckSilence(MonotonicNow() + time);
      closed = job_->closed();
    });
    return closed;
  }
  bool TrainsAStep() {
    const int64_t before = committed();
    for (int rank = 0; rank < kRanks; ++rank) Train(rank);
    return Until([&] { return job_->committed_step() == before + 1; });
  }
  std::string LastEvent() {
    const std::vector<v1::Event> events = events_.List();
    return events.empty() ? "" : events.back().text();
  }
  using JobCoreTest::Until;
  using JobCoreTest::value;
};

class StuckCopyTest : public ::testing::Test {
 protected:
  StuckCopyTest() {
    stuck_.emplace(&memory_, &copier_);
    healthy_.emplace(&memory_, &copier_);
  }
  ~StuckCopyTest() override {
    memory_.LetGo();
    copier_.RunAndWait([] {});  // what names the jobs' loops
    healthy_.reset();
    stuck_.reset();
  }

  HeldMemory memory_;
  CoreLoop copier_;
  std::optional<OnGpu> stuck_, healthy_;
};

TEST_F(StuckCopyTest, EndsItsOwnJobAndOthersOnTheSameGpuGoOn) {
  stuck_->EnterWithWriteback();
  memory_.Hold();
  stuck_->Write(7);
  ASSERT_TRUE(testing::PollUntil([&] { return memory_.Stuck(); }, kPatience));
  EXPECT_TRUE(healthy_->TrainsAStep());
  healthy_->EnterWithWriteback();
  healthy_->Write(9);
  EXPECT_TRUE(healthy_->Held());
  EXPECT_FALSE(stuck_->ClosedAfter(absl::Seconds(59)));
  EXPECT_TRUE(stuck_->ClosedAfter(absl::Seconds(61)));
  EXPECT_THAT(stuck_->LastEvent(), ::testing::HasSubstr("a copy of its values has not ended after 1m: a GPU's driver "
                                                        "does not return"));
  EXPECT_FALSE(healthy_->ClosedAfter(absl::Seconds(61))) << "it waits for another's copy";
  memory_.LetGo();
  EXPECT_TRUE(healthy_->Until([&] { return healthy_->value() == 9; }));
  EXPECT_FALSE(healthy_->Held());
  EXPECT_FALSE(healthy_->ClosedAfter(absl::Seconds(61))) << "its copy has ended";
}

}  // namespace
}  // namespace shardd
