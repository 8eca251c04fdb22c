// What every Collective must do with parameters.

#include "common/plan/node_part.h"
#include "tests/server/collective/collective_fixture.h"
#include "tests/testing/float8_reference.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

class AllGatherTest : public CollectiveTest {
 protected:
  absl::Status Gather(AllGatherRequest request) {
    return WaitFor([&](Collective::Done done) { collective_->AllGather(std::move(request), std::move(done)); });
  }
  static SpecBuilder Model(int world_size, v1::Layout layout, DType param_dtype) {
    SpecBuilder builder(world_size);
    builder.config().set_layout(layout);
    builder.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
    builder.config().mutable_mixed_precision()->set_param_dtype(param_dtype);
    const int a = builder.AddSharded(0, "a");
    builder.Param(a, "weight", {33, 15});
    builder.Param(a, "bias", {7});
    builder.Param(a, "frozen", {5, 3}, {.requires_grad = false});
    builder.Param(a, "half", {9}, {.dtype = v1::DTYPE_FLOAT16});
    builder.Param(a, "wide", {2}, {.dtype = v1::DTYPE_FLOAT64, .requires_grad = false});
    builder.Param(a, "steps", {3}, {.dtype = v1::DTYPE_INT64, .requires_grad = false});
    builder.Param(0, "large", {400, 1000});
    return builder;
  }
  // The bytes of one parameter in a slab or slot.
  static std::string BytesOf(const char* base, DType dtype, int64_t first, int64_t numel) {
    return std::string(base + first * DTypeSizeBytes(dtype), static_cast<size_t>(numel * DTypeSizeBytes(dtype)));
  }
};

TEST_P(AllGatherTest, TheImageHoldsEveryParameterInItsUnshardedDType) {
  for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
      for (int world_size : {1, 3, 4}) {
        SCOPED_TRACE(absl::StrCat(v1::Layout_Name(layout), " ", DTypeName(dtype), " ranks: ", world_size));
        Start(Model(world_size, layout, dtype).Plan(), 2);
        Bytes shards(plan_.memory.shards_bytes);
        for (size_t p = 0; p < plan_.params.size(); ++p) {
          const Place at(plan_, static_cast<int>(p));
          if (IsFloatingPoint(at.flat.dtype)) {
            WriteShard(plan_, shards, static_cast<int>(p), ParamValues(plan_, static_cast<int>(p), 5));
          } else {
            std::memset(shards.data() + at.flat.shards_offset_bytes + at.offset * DTypeSizeBytes(at.flat.dtype), 0x37,
                        static_cast<size_t>(at.numel * DTypeSizeBytes(at.flat.dtype)));
          }
        }
        for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) {
          ASSERT_LE(plan_.groups[group].unsharded_bytes, plan_.pool_slot_bytes);
          Bytes slot(plan_.groups[group].unsharded_bytes, 0xff);
          ASSERT_TRUE(Gather({&plan_, group, shards.data(), slot.data(), -1, {}, "unshard"}).ok());
          for (int p : plan_.groups[group].params) {
            const Place at(plan_, p);
            const std::string got =
                BytesOf(slot.data() + at.flat.pool_offset_bytes, at.flat.unsharded_dtype, at.offset, at.numel);
            Bytes want(at.numel * 8);
            Cast(shards.data() + at.flat.shards_offset_bytes + at.offset * DTypeSizeBytes(at.flat.dtype), at.flat.dtype,
                 want.data(), at.flat.unsharded_dtype, at.numel);
            EXPECT_EQ(got, BytesOf(want.data(), at.flat.unsharded_dtype, 0, at.numel)) << plan_.params[p].fqn;
          }
        }
      }
    }
  }
}

TEST_P(AllGatherTest, ALargeGroupIsSpreadOverAllDevicesOnUnshard) {
  Start(Model(4, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16).Plan(), 4);
  Bytes shards(plan_.memory.shards_bytes);
  Bytes slot(plan_.pool_slot_bytes);
  ASSERT_TRUE(Gather({&plan_, 0, shards.data(), slot.data(), -1, {}, "unshard (root)"}).ok());
  for (const auto& device : wrapped_) {
    ASSERT_EQ(device->records().size(), 1u) << device->name();
    EXPECT_EQ(device->records()[0].stream, StreamId::kUnshard);
    EXPECT_EQ(device->records()[0].label, "unshard (root)");
  }
}

TEST_P(AllGatherTest, TheReadersDeviceCopiesAllAndCrossesNoBoundary) {
  for (DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16}) {
    for (v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
      Start(Model(4, layout, dtype).Plan(), 4);
      Bytes shards(plan_.memory.shards_bytes);
      for (int64_t i = 0; i < shards.size_bytes() / 4; ++i) {
        reinterpret_cast<float*>(shards.data())[i] = static_cast<float>(i % 1000);
      }
      for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) {
        Bytes want(plan_.groups[group].unsharded_bytes, 0);
        ASSERT_TRUE(Gather({&plan_, group, shards.data(), want.data(), -1, {}, "spread"}).ok());
        for (int reader = 0; reader < 4; ++reader) {
          const auto records_before = [&] {
            std::vector<size_t> counts;
            for (const auto& device : wrapped_) counts.push_back(device->records().size());
            return counts;
          }();
          Bytes got(plan_.groups[group].unsharded_bytes, 0);
          // Also before the first, behind the last, and in the middle of padding.
          const std::vector<int64_t> boundaries = {64, 1024, 4096, 65536, 262144, 1 << 20, int64_t{1} << 30};
          ASSERT_TRUE(Gather({&plan_, group, shards.data(), got.data(), reader, boundaries, "unshard"}).ok());
          EXPECT_TRUE(got == want) << reader;
          const auto last = wrapped_[reader]->records().back();
          EXPECT_EQ(last.stream, StreamId::kUnshard);
          for (const DeviceOp& any : last.ops) {
            const CastOp& op = std::get<CastOp>(any);
            const int64_t begin = static_cast<const char*>(op.src) - shards.data();
            const int64_t end = begin + op.numel * DTypeSizeBytes(op.from);
            for (const int64_t boundary : boundaries) EXPECT_FALSE(begin < boundary && boundary < end) << boundary;
          }
          for (int other = 0; other < 4; ++other) {
            EXPECT_EQ(wrapped_[other]->records().size() - records_before[other], other == reader ? 1u : 0u);
          }
        }
      }
    }
  }
}

// With offload to the host the optimizer has cast: what is copied is its copy, and no device casts.
TEST_P(AllGatherTest, WhatHasACastCopyIsCopiedFromIt) {
  SpecBuilder builder = Model(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16);
  builder.config().set_offload(v1::OFFLOAD_HOST);
  Start(builder.Plan(), 2);
  Bytes shards(plan_.memory.shards_bytes, 0x11);
  Bytes parameters(plan_.memory.parameters_bytes, 0x22);
  for (const int reader : {-1, 1}) {
    for (int group = 0; group < static_cast<int>(plan_.groups.size()); ++group) {
      Bytes slot(plan_.groups[group].unsharded_bytes, 0xff);
      ASSERT_TRUE(Gather({&plan_, group, shards.data(), slot.data(), reader, {}, "", parameters.data()}).ok());
      for (int p : plan_.groups[group].params) {
        const Place at(plan_, p);
        const char want = at.flat.dtype == at.flat.unsharded_dtype ? 0x11 : 0x22;
        EXPECT_EQ(BytesOf(slot.data() + at.flat.pool_offset_bytes, at.flat.unsharded_dtype, at.offset, at.numel),
                  std::string(static_cast<size_t>(at.numel * DTypeSizeBytes(at.flat.unsharded_dtype)), want))
            << plan_.params[p].fqn;
      }
    }
  }
  for (const auto& device : wrapped_) {
    for (const WrappedDevice::Record& record : device->records()) {
      for (const DeviceOp& op : record.ops) EXPECT_EQ(std::get<CastOp>(op).from, std::get<CastOp>(op).to);
    }
  }
  Bytes slot(plan_.pool_slot_bytes);
  const absl::Status refused = Gather({&plan_, 0, shards.data(), slot.data(), -1, {}, ""});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no cast parameters"));
}

// Ranks' parts end within blocks, which begin where the node's part of a parameter does.
TEST_P(AllGatherTest, TheNodesPartIsReadAsOtherNodesGetIt) {
  for (const v1::Layout layout : {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0}) {
    for (const DType dtype : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16}) {
      SCOPED_TRACE(absl::StrCat(v1::Layout_Name(layout), " ", DTypeName(dtype)));
      SpecBuilder builder(3);
      builder.config().set_layout(layout);
      builder.config().mutable_mixed_precision()->set_param_dtype(dtype);
      builder.config().mutable_mixed_precision()->set_float8_gathers(true);
      for (int node = 0; node < 2; ++node) {
        builder.config().mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7000"));
      }
      builder.Param(0, "weight", {401, 1001});
      builder.Param(0, "bias", {7});
      builder.Param(0, "ids", {41}, {.dtype = v1::DTYPE_INT64, .requires_grad = false});
      Start(*PlanShards(builder.spec(), 1), 3);
      Bytes shards(plan_.memory.shards_bytes, 0x37);
      for (const int p : {0, 1}) WriteShard(plan_, shards, p, ParamValues(plan_, p, 5));
      Bytes slot(plan_.groups[0].unsharded_bytes, 0xff);
      const absl::Status status = Gather({&plan_, 0, shards.data(), slot.data(), -1, {}, "unshard"});
      if (absl::IsUnimplemented(status)) {  // on GPUs; such a job is refused
        EXPECT_THAT(std::string(GetParam().name), HasSubstr("nccl"));
        continue;
      }
      ASSERT_TRUE(status.ok()) << status;
      for (size_t p = 0; p < 3; ++p) {
        const Place at(plan_, static_cast<int>(p));
        const ParamRange own = NodeRangeOf(plan_, static_cast<int>(p), 1);
        ASSERT_GT(own.numel, 0);
        std::string want(static_cast<size_t>(own.numel * DTypeSizeBytes(at.flat.unsharded_dtype)), 0x37);
        if (IsFloatingPoint(at.flat.dtype)) {
          std::vector<float> values(static_cast<size_t>(own.numel));
          Cast(shards.data() + at.flat.shards_offset_bytes + (at.offset + own.first) * 4, v1::DTYPE_FLOAT32,
               want.data(), at.flat.unsharded_dtype, own.numel);
          Cast(want.data(), at.flat.unsharded_dtype, values.data(), v1::DTYPE_FLOAT32, own.numel);
          testing::RoundToFloat8(values.data(), own.numel);
          Cast(values.data(), v1::DTYPE_FLOAT32, want.data(), at.flat.unsharded_dtype, own.numel);
        }
        EXPECT_TRUE(BytesOf(slot.data() + at.flat.pool_offset_bytes, at.flat.unsharded_dtype, at.offset + own.first,
                            own.numel) == want)
            << plan_.params[p].fqn;
      }
    }
  }
}

TEST_P(AllGatherTest, MalformedRequestsAreRefused) {
  Start(Model(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16).Plan(), 2);
  Bytes shards(plan_.memory.shards_bytes);
  Bytes slot(plan_.pool_slot_bytes);
  const std::vector<std::pair<const char*, AllGatherRequest>> malformed = {
      {"no plan", {nullptr, 0, shards.data(), slot.data(), -1, {}, ""}},
      {"group is out of range (got 2, want 0 to 1)", {&plan_, 2, shards.data(), slot.data(), -1, {}, ""}},
      {"null pointer", {&plan_, 0, nullptr, slot.data(), -1, {}, ""}},
      {"null pointer", {&plan_, 0, shards.data(), nullptr, -1, {}, ""}},
      {"reader is out of range (got 2, want -1 to 1)", {&plan_, 0, shards.data(), slot.data(), 2, {}, ""}},
      {"reader is out of range (got -2, want -1 to 1)", {&plan_, 0, shards.data(), slot.data(), -2, {}, ""}},
  };
  for (const auto& [message, request] : malformed) {
    const absl::Status status = Gather(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST_P(AllGatherTest, TheFirstErrorOfADeviceIsTheResult) {
  Start(Model(2, v1::LAYOUT_FLAT, v1::DTYPE_BFLOAT16).Plan(), 2);
  Bytes shards(plan_.memory.shards_bytes);
  Bytes slot(plan_.pool_slot_bytes);
  for (const auto& device : wrapped_) device->FailWith(absl::UnavailableError("gone"));
  EXPECT_EQ(Gather({&plan_, 0, shards.data(), slot.data(), -1, {}, ""}).code(), absl::StatusCode::kUnavailable);
}

SHARDD_FOR_EACH_COLLECTIVE(AllGatherTest);

}  // namespace
}  // namespace shardd
