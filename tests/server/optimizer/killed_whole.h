#ifndef SHARDD_TESTS_SERVER_OPTIMIZER_KILLED_WHOLE_H_
#define SHARDD_TESTS_SERVER_OPTIMIZER_KILLED_WHOLE_H_

// Updates of parameters that one rank has whole (Muon's, Adafactor's), as a daemon leaves them that dies.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <variant>
#include <vector>

#include "common/tensor/update_log.h"
#include "server/device/cpu/cpu_ops.h"
#include "server/device/ops/check.h"
#include "server/device/ops/rest_of_update.h"
#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {

// `OpsTest`: the OptimizerTest with such parameters, which has a workspace. `Op`: the operation that updates one.
template <typename OpsTest, typename Op>
class KilledWhole : public OpsTest {
 protected:
  static constexpr int64_t kStep = 9;
  // Where each array that an operation updates ends, in its items.
  using Ends = std::vector<int64_t> (*)(const Op& op);

  // Kills a daemon of two ranks behind each item, and in the midst of the block behind it; what its successor
  // completes, without memory to work in, has the bits of an undisturbed update. REQUIRES: gradients are written.
  void ExpectCompletedBehindEachItem(const DecidedStep& decided, Ends ends) {
    const Bytes shards = this->shards_->Copy(), optimizer = this->optimizer_->Copy(),
                parameters = this->parameters_->Copy();
    this->RunUpdate(decided);
    const Bytes want = this->shards_->Copy(), want_optimizer = this->optimizer_->Copy(),
                want_cast = this->parameters_->Copy();
    SlabPointers successor = this->slabs_;
    successor.workspace = nullptr;  // it has none of the job's yet
    bool more = true;
    for (int64_t items = 0; more; ++items) {
      for (const bool tears : {false, true}) {
        CopyTo(shards, this->shards_.get());
        CopyTo(optimizer, this->optimizer_.get());
        CopyTo(parameters, this->parameters_.get());
        UpdateLog logs[2] = {};
        more = false;
        for (int rank = 0; rank < 2; ++rank) {
          logs[rank].Begin(kStep);
          const std::vector<DeviceOp> ops = UpdateOps(this->plan_, this->slabs_, decided, rank, {&logs[rank]});
          more |= RunSome(ops, items, tears ? ends : nullptr, &logs[rank]);
        }
        for (int rank = 0; rank < 2; ++rank) {
          for (const DeviceOp& op : UpdateOps(this->plan_, successor, decided, rank, {&logs[rank]}))
            EXPECT_TRUE(CompleteCpuOp(op, kStep).ok());
        }
        ASSERT_TRUE(*this->shards_ == want && *this->optimizer_ == want_optimizer && *this->parameters_ == want_cast)
            << "stopped behind item " << items << (tears ? ", torn" : "");
      }
    }
  }
  static void CopyTo(const Bytes& from, Bytes* to) {
    std::memcpy(to->data(), from.data(), static_cast<size_t>(from.size_bytes()));
  }

 private:
  // Runs `items` slices of a rank's operations, and with `torn` tears the next block of a parameter. Returns whether
  // there was more.
  static bool RunSome(const std::vector<DeviceOp>& ops, int64_t items, Ends torn, UpdateLog* log) {
    for (const DeviceOp& op : ops) {
      const int64_t slice = CpuOpSlice(op), extent = OpExtent(op);
      for (int64_t first = 0; first < extent; first += slice, --items) {
        if (items == 0) {
          if (const auto* const of = std::get_if<Op>(&op); torn != nullptr && of != nullptr) Tear(*of, torn(*of), log);
          return true;
        }
        RunCpuOp(op, first, std::min(slice, extent - first));
      }
    }
    return false;
  }
  // Nothing in the block is right.
  static void Tear(const Op& op, const std::vector<int64_t>& ends, UpdateLog* log) {
    const int64_t done = log->done(kStep) - op.logged.first;
    const auto end = std::upper_bound(ends.begin(), ends.end(), done);
    if (end == ends.end()) return;
    const int64_t count = std::min<int64_t>(3, *end - done);
    const UpdatedArrays updated = UpdatedArraysOf(op, done, count);
    for (int i = 0; i < UpdateLog::kArrays; ++i) {
      const UpdateLog::Array& array = updated.arrays[i];
      if (array.data == nullptr) continue;
      log->Save(i, array.data, array.size_bytes);
      log->Begun(log->done(kStep), count);
      std::memset(array.data, 0x7f, static_cast<size_t>(array.size_bytes));
    }
  }
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_OPTIMIZER_KILLED_WHOLE_H_
