#ifndef SHARDD_COMMON_SHM_SESSION_VIEW_H_
#define SHARDD_COMMON_SHM_SESSION_VIEW_H_

// Views of a session's two objects, by address arithmetic only. Counts and offsets come from the plan as plain numbers,
// so that this folder does not depend on it.
//
//   daemon page:     DaemonPage up to `tail` | slots x SlotEntry | groups x GroupEntry | up to a multiple of 4096
//   session memory:  ClientPage (4096 bytes) | ring | trace ring | masks | step payload | slots, at offsets of the
//   layout

#include <cstddef>
#include <cstdint>

#include "common/shm/page.h"
#include "common/shm/ring.h"
#include "common/shm/trace_ring.h"

namespace shardd {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kDaemonPageTailOffset = offsetof(DaemonPage, tail);
static_assert(kDaemonPageTailOffset % alignof(SlotEntry) == 0 && kDaemonPageTailOffset % alignof(GroupEntry) == 0);
static_assert(sizeof(SlotEntry) == 128 && sizeof(GroupEntry) == 128);

constexpr int64_t RoundUpToPage(int64_t size_bytes) { return (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// Bytes of a session's daemon page. REQUIRES: both >= 0 and below 2^31.
constexpr int64_t DaemonPageBytes(int64_t slots, int64_t groups) {
  return RoundUpToPage(kDaemonPageTailOffset + slots * static_cast<int64_t>(sizeof(SlotEntry)) +
                       groups * static_cast<int64_t>(sizeof(GroupEntry)));
}

// The daemon's page: DaemonPageView for its writer, the const ReadOnlyDaemonPageView for the client, which maps it
// read-only. Views do not own the mapping. REQUIRES for every accessor: indices are within the counts.
template <typename Page, typename Slot, typename Group, typename Byte>
class BasicDaemonPageView {
 public:
  BasicDaemonPageView() = default;
  BasicDaemonPageView(Byte* base, int64_t slots, int64_t groups) : base_(base), slots_(slots), groups_(groups) {}

  Page& page() const { return *reinterpret_cast<Page*>(base_); }
  Slot& slot(int64_t index) const {
    return reinterpret_cast<Slot*>(static_cast<CharOf*>(base_) + kDaemonPageTailOffset)[index];
  }
  Group& group(int64_t index) const {
    return reinterpret_cast<Group*>(static_cast<CharOf*>(base_) + kDaemonPageTailOffset +
                                    slots_ * static_cast<int64_t>(sizeof(SlotEntry)))[index];
  }
  int64_t slots() const { return slots_; }
  int64_t groups() const { return groups_; }
  int64_t size_bytes() const { return DaemonPageBytes(slots_, groups_); }
  bool valid() const { return base_ != nullptr; }

 private:
  template <typename T>
  struct CharFor {
    using Type = char;
  };
  template <typename T>
  struct CharFor<const T> {
    using Type = const char;
  };
  using CharOf = typename CharFor<Byte>::Type;

  Byte* base_ = nullptr;
  int64_t slots_ = 0;
  int64_t groups_ = 0;
};
using DaemonPageView = BasicDaemonPageView<DaemonPage, SlotEntry, GroupEntry, void>;
using ReadOnlyDaemonPageView = BasicDaemonPageView<const DaemonPage, const SlotEntry, const GroupEntry, const void>;

// The session memory, with its parts at the layout's offsets (bytes from the base). Does not own the mapping.
class SessionMemoryView {
 public:
  SessionMemoryView() = default;
  SessionMemoryView(void* base, int64_t ring_offset, int64_t masks_offset)
      : base_(static_cast<char*>(base)), ring_offset_(ring_offset), masks_offset_(masks_offset) {}

  ClientPage& page() const { return *reinterpret_cast<ClientPage*>(base_); }
  // The place of record `n`; ring.h says who may touch it when.
  CommandRecord& record(uint64_t n) const {
    return reinterpret_cast<CommandRecord*>(base_ + ring_offset_)[n % kRingRecords];
  }
  // A mask, with bit i in byte i / 8; `offset_bytes` counts from the start of the masks area.
  uint8_t* mask(int64_t offset_bytes) const { return reinterpret_cast<uint8_t*>(base_ + masks_offset_ + offset_bytes); }
  template <typename T>
  T* At(int64_t offset_bytes) const {
    return reinterpret_cast<T*>(base_ + offset_bytes);
  }
  bool valid() const { return base_ != nullptr; }

 private:
  char* base_ = nullptr;
  int64_t ring_offset_ = 0;
  int64_t masks_offset_ = 0;
};

// Bit `index` of a mask.
inline bool MaskBit(const uint8_t* mask, int64_t index) { return ((mask[index / 8] >> (index % 8)) & 1) != 0; }
inline void SetMaskBit(uint8_t* mask, int64_t index, bool value) {
  const uint8_t bit = static_cast<uint8_t>(1u << (index % 8));
  mask[index / 8] = static_cast<uint8_t>(value ? mask[index / 8] | bit : mask[index / 8] & ~bit);
}
constexpr int64_t MaskBytes(int64_t bits) { return (bits + 7) / 8; }

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SESSION_VIEW_H_
