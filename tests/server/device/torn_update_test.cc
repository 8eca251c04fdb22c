// An update by a GPU whose process dies in any copy, word or kernel of it, and whose successors do too, is completed
// with the bits of an undisturbed one.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/shm/unique_fd.h"
#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/cuda/kernels.h"
#include "server/device/cuda/make_cuda_devices.h"
#include "server/device/device_memory.h"
#include "server/device/ops/rest_of_update.h"
#include "server/job/wait.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/machine.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr int kOps = 3;
constexpr int64_t kNumel = 2501;       // of each of the operations: not a multiple of anything
constexpr int64_t kPieceNumel = 1000;  // so there are three pieces of each
constexpr int64_t kPlaceBytes = UpdateLog::kArrays * kPieceNumel * UpdateLog::kMaxElementBytes;
constexpr int64_t kPage = int64_t{2} << 20;
constexpr int64_t kStep = 41;

// Memory of the job's: on GPU 0 values, on GPU 1 the place for old ones.
struct Values {
  float p[kOps][kNumel], m[kOps][kNumel], v[kOps][kNumel], g[kOps][kNumel];
  uint16_t cast[kOps][kNumel];
};
static_assert(sizeof(Values) < kPage && kPlaceBytes < kPage);

// A piece of a GPU's memory as the fake driver has it, held by a process that has no driver, as a custodian would.
class HeldPiece {
 public:
  explicit HeldPiece(int gpu)
      : fd_(memfd_create(absl::StrCat("fake-cuda-", gpu).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    if (ftruncate(fd_.get(), kPage) != 0) std::abort();
    data_ = static_cast<char*>(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
  }
  ~HeldPiece() { munmap(data_, kPage); }
  UniqueFd fd() const { return UniqueFd(dup(fd_.get())); }
  char* data() const { return data_; }

 private:
  const UniqueFd fd_;
  char* data_;
};

struct Death {
  std::string in;
  int at = 0;
};

class TornUpdate : public ::testing::TestWithParam<bool> {
 protected:
  TornUpdate()
      : log_(static_cast<UpdateLog*>(
            mmap(nullptr, sizeof(UpdateLog), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    Fill(&want_);
    for (const DeviceOp& op : Ops(&want_, {})) RunCpuOp(op, 0, kNumel);
  }
  ~TornUpdate() override { munmap(log_, sizeof(UpdateLog)); }
  Values& values() { return *reinterpret_cast<Values*>(shards_.data()); }

  static void Fill(Values* values) {
    std::memset(static_cast<void*>(values), 0, sizeof(*values));
    std::mt19937 random(7);
    for (int op = 0; op < kOps; ++op) {
      for (int64_t i = 0; i < kNumel; ++i) {
        values->p[op][i] = static_cast<float>(random() % 1000) / 500 - 1;
        values->g[op][i] = static_cast<float>(random() % 1000) / 500 - 1;
        values->m[op][i] = static_cast<float>(random() % 1000) / 1000;
        values->v[op][i] = static_cast<float>(random() % 1000) / 1000;
      }
    }
  }
  static std::vector<DeviceOp> Ops(Values* values, Logged logged) {
    std::vector<DeviceOp> ops;
    for (int op = 0; op < kOps; ++op) {
      logged.first = op * kNumel;
      float *p = values->p[op], *g = values->g[op], *m = values->m[op];
      if (GetParam()) {
        ops.emplace_back(AdamWOp{{1e-2, 0.9, 0.999, 1e-8, 0.1, 5, 0.5, false},
                                 p,
                                 v1::DTYPE_FLOAT32,
                                 g,
                                 m,
                                 values->v[op],
                                 values->cast[op],
                                 v1::DTYPE_BFLOAT16,
                                 kNumel,
                                 logged});
      } else {
        ops.emplace_back(SgdOp{{1e-2, 0.9, 0, 0.1, false, false, 0.5},
                               p,
                               v1::DTYPE_FLOAT32,
                               g,
                               m,
                               values->cast[op],
                               v1::DTYPE_BFLOAT16,
                               kNumel,
                               logged});
      }
    }
    return ops;
  }
  static bool Run(Device& device, std::vector<DeviceOp> ops) {
    absl::Status ended;
    absl::Notification done;
    device.Submit(StreamId::kOptimizer, {"update", std::move(ops), [&](const absl::Status& status) {
                                           ended = status;
                                           done.Notify();
                                         }});
    done.WaitForNotification();
    return ended.ok();
  }
  // A daemon: takes the memory up and updates it, or what is left of that. 0, unless it dies; it may not.
  int Update(const Death& death, bool completes) {
    fake_cuda::MachineOptions options;
    options.gpus = 2;
    options.dies_in = death.in;
    options.dies_at = death.at;
    fake_cuda::Machine machine(options);
    fake_cuda::AddReferenceKernels(machine);
    const CudaDriver driver(fake_cuda::Table());
    (void)driver->Init(0);
    auto made = MakeCudaDevices(driver, {true, {}}, absl::MakeConstSpan(fake_cuda::kFatbinMagic));
    if (!made.ok()) return 2;
    Device& device = *made->devices[0];
    DeviceMemory* const on = device.memory();
    DeviceMemory* const other = made->devices[1]->memory();
    std::vector<UniqueFd> fds;
    fds.push_back(shards_.fd());
    fds.push_back(old_.fd());
    auto slab = on->TakeUpSlab("slab", {{on, kPage}, {other, kPage}}, std::move(fds), {on, other});
    auto pinned = on->RegisterHost("log", log_, sizeof(UpdateLog), {on});
    if (!slab.ok() || !pinned.ok()) return 3;
    auto* const values = reinterpret_cast<Values*>((*slab)->data());
    const std::vector<DeviceOp> ops = Ops(values, {log_, 0, {(*slab)->data() + kPage, kPieceNumel}});
    if (!completes) return Run(device, ops) ? 0 : 4;
    RestOfUpdate rest = RestOf(ops, kStep);
    if (!Run(device, std::move(rest.put_back))) return 5;
    log_->NotTorn();
    return Run(device, std::move(rest.ops)) ? 0 : 6;
  }
  int UpdateInAProcess(const Death& death, bool completes) {
    testing::Child child([&] {
      const int code = Update(death, completes);
      _exit(code);
      return code;
    });
    return child.Wait();
  }
  void Begin() {
    Fill(&values());
    std::memset(old_.data(), 0xff, kPlaceBytes);
    log_->Begin(kStep);
  }
  // Deaths of the first in each of its calls of a kind, and of the second one too, in the call `second` (0: none).
  void DieEverywhere(const std::string& in, const Death& second) {
    int torn = 0, part = 0, kills = 0;
    for (int at = 1;; ++at) {
      Begin();
      const int first = UpdateInAProcess({in, at}, /*completes=*/false);
      if (first == 0) break;
      ASSERT_EQ(first, 1000 + SIGKILL);
      ++kills;
      torn += log_->is_torn(kStep) ? 1 : 0;
      part += log_->done(kStep) > 0 ? 1 : 0;
      if (second.at > 0) UpdateInAProcess(second, /*completes=*/true);
      ASSERT_EQ(UpdateInAProcess({}, /*completes=*/true), 0);
      ASSERT_EQ(std::memcmp(&values(), &want_, sizeof(Values)), 0) << in << " " << at;
    }
    EXPECT_GE(kills, 9);
    EXPECT_GE(part, 6);
    // In a copy there is nothing torn: what is being copied has not changed yet.
    if (in != "cuMemcpyAsync") {
      EXPECT_GE(torn, 8);
    }
  }
  static const char* Kernel() { return GetParam() ? cuda::kAdamWKernel : cuda::kSgdKernel; }

  UpdateLog* const log_;
  const HeldPiece shards_{0}, old_{1};
  Values want_;
};

TEST_P(TornUpdate, WithoutADeathIsThatOfTheHost) {
  Begin();
  ASSERT_EQ(UpdateInAProcess({}, /*completes=*/false), 0);
  EXPECT_EQ(std::memcmp(&values(), &want_, sizeof(Values)), 0);
  EXPECT_EQ(log_->done(kStep), kOps * kNumel);
  EXPECT_FALSE(log_->is_torn(kStep));
}

TEST_P(TornUpdate, InAKernelIsCompleted) { DieEverywhere(Kernel(), {}); }
TEST_P(TornUpdate, BeforeAWordIsCompleted) { DieEverywhere("cuStreamWriteValue64", {}); }
TEST_P(TornUpdate, InACopyOfOldValuesIsCompleted) { DieEverywhere("cuMemcpyAsync", {}); }

// Behind the warm-up of its engine, which has one of each kind: in what it puts back, in the piece that it does again,
// and in a later one.
TEST_P(TornUpdate, IsCompletedBehindASuccessorThatDiesToo) {
  DieEverywhere(Kernel(), {"cuMemcpyAsync", 2});
  DieEverywhere(Kernel(), {"cuMemcpyAsync", 6});
  DieEverywhere(Kernel(), {"cuStreamWriteValue64", 2});
  DieEverywhere(Kernel(), {Kernel(), 2});
  DieEverywhere("cuStreamWriteValue64", {Kernel(), 3});
}

// Whose log is of the step before: all of it is to be done.
TEST_P(TornUpdate, ThatHasNotBegunIsDoneFromItsBeginning) {
  Begin();
  log_->Begin(kStep - 1);
  log_->Done(kOps * kNumel);
  log_->Begin(kStep);
  ASSERT_EQ(UpdateInAProcess({}, /*completes=*/true), 0);
  EXPECT_EQ(std::memcmp(&values(), &want_, sizeof(Values)), 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TornUpdate, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AdamW" : "SgdWithMomentum"; });

// Whoever asks for a log that is nowhere is told so, by name.
TEST(LoggedUpdate, WithoutAPlaceForOldValuesIsRefused) {
  fake_cuda::Machine machine;
  fake_cuda::AddReferenceKernels(machine);
  const CudaDriver driver(fake_cuda::Table());
  (void)driver->Init(0);
  auto made = MakeCudaDevices(driver, {true, {}}, absl::MakeConstSpan(fake_cuda::kFatbinMagic));
  ASSERT_TRUE(made.ok()) << made.status();
  auto slab = made->devices[0]->memory()->MakeSlab("slab", kPage, {});
  ASSERT_TRUE(slab.ok());
  auto* const values = reinterpret_cast<float*>((*slab)->data());
  UpdateLog log{};
  SgdOp op{{1e-2, 0, 0, 0, false, true, 1}, values, v1::DTYPE_FLOAT32, values + 64, nullptr, nullptr, {}, 8, {&log}};
  op.cast_dtype = v1::DTYPE_FLOAT32;
  absl::Status ended;
  absl::Notification done;
  made->devices[0]->Submit(StreamId::kOptimizer, {"update", {op}, [&](const absl::Status& status) {
                                                    ended = status;
                                                    done.Notify();
                                                  }});
  done.WaitForNotification();
  EXPECT_EQ(ended.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(ended.message()).find("there is no memory of the GPU for its old values"), std::string::npos)
      << ended;
}

}  // namespace
}  // namespace shardd
