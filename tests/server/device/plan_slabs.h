#ifndef SHARDD_TESTS_SERVER_DEVICE_PLAN_SLABS_H_
#define SHARDD_TESTS_SERVER_DEVICE_PLAN_SLABS_H_

// Memory laid out by a plan, with access by (parameter, element), for tests that compute on it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include "common/plan/plan.h"
#include "common/tensor/kernels.h"

namespace shardd {

// Where Bytes are from: a test on devices that do not reach all of the host's memory sets it to what they reach.
inline std::pmr::memory_resource*& BytesMemory() {
  static std::pmr::memory_resource* memory = std::pmr::new_delete_resource();
  return memory;
}

// 64-byte aligned bytes, all set to `fill`. 0xff makes every floating dtype NaN.
class Bytes {
 public:
  explicit Bytes(int64_t size_bytes, int fill = 0) : size_bytes_(size_bytes), data_(Allocate(size_bytes)) {
    std::memset(data_.get(), fill, static_cast<size_t>(size_bytes));
  }
  char* data() { return data_.get(); }
  const char* data() const { return data_.get(); }
  int64_t size_bytes() const { return size_bytes_; }
  bool operator==(const Bytes& other) const {
    return size_bytes_ == other.size_bytes_ && std::memcmp(data(), other.data(), static_cast<size_t>(size_bytes_)) == 0;
  }
  Bytes Copy() const {
    Bytes copy(size_bytes_);
    std::memcpy(copy.data(), data(), static_cast<size_t>(size_bytes_));
    return copy;
  }

 private:
  struct Free {
    std::pmr::memory_resource* memory;
    size_t size_bytes;
    void operator()(char* p) const { memory->deallocate(p, size_bytes, 64); }
  };
  static std::unique_ptr<char, Free> Allocate(int64_t size_bytes) {
    const size_t rounded = static_cast<size_t>(size_bytes + 127) / 64 * 64;
    return {static_cast<char*>(BytesMemory()->allocate(rounded, 64)), Free{BytesMemory(), rounded}};
  }
  int64_t size_bytes_;
  std::unique_ptr<char, Free> data_;
};

// `values` written as elements [first, ...) of `dtype`.
inline void WriteAs(const std::vector<float>& values, DType dtype, char* base, int64_t first) {
  Cast(values.data(), v1::DTYPE_FLOAT32, base + first * DTypeSizeBytes(dtype), dtype,
       static_cast<int64_t>(values.size()));
}
inline std::vector<float> ReadAs(const char* base, DType dtype, int64_t first, int64_t numel) {
  std::vector<float> values(static_cast<size_t>(numel));
  Cast(base + first * DTypeSizeBytes(dtype), dtype, values.data(), v1::DTYPE_FLOAT32, numel);
  return values;
}

// Small values that differ by parameter, element and `seed`, exact in every dtype.
inline std::vector<float> ParamValues(const ShardPlan& plan, int param, int seed) {
  std::vector<float> values(static_cast<size_t>(plan.params[param].numel));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((static_cast<int64_t>(i) * 7 + param * 13 + seed * 29) % 61 - 30) / 8;
  }
  return values;
}

// A parameter's place in each slab.
struct Place {
  Place(const ShardPlan& plan, int param)
      : flat(plan.flat_params[plan.params[param].flat_param]),
        offset(plan.params[param].offset),
        numel(plan.params[param].numel) {}
  const FlatParamPlan& flat;
  int64_t offset;
  int64_t numel;
};

inline std::vector<float> ReadShard(const ShardPlan& plan, const Bytes& shards, int param) {
  const Place at(plan, param);
  return ReadAs(shards.data() + at.flat.shards_offset_bytes, at.flat.dtype, at.offset, at.numel);
}
inline void WriteShard(const ShardPlan& plan, Bytes& shards, int param, const std::vector<float>& values) {
  const Place at(plan, param);
  WriteAs(values, at.flat.dtype, shards.data() + at.flat.shards_offset_bytes, at.offset);
}
inline std::vector<float> ReadGradient(const ShardPlan& plan, const Bytes& gradients, int param) {
  const Place at(plan, param);
  return ReadAs(gradients.data() + at.flat.gradients_offset_bytes, v1::DTYPE_FLOAT32, at.offset, at.numel);
}
inline void WriteGradient(const ShardPlan& plan, Bytes& gradients, int param, const std::vector<float>& values) {
  const Place at(plan, param);
  WriteAs(values, v1::DTYPE_FLOAT32, gradients.data() + at.flat.gradients_offset_bytes, at.offset);
}
inline void WriteSlot(const ShardPlan& plan, Bytes& slot, int param, const std::vector<float>& values) {
  const Place at(plan, param);
  WriteAs(values, at.flat.unsharded_dtype, slot.data() + at.flat.slot_offset_bytes, at.offset);
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_PLAN_SLABS_H_
