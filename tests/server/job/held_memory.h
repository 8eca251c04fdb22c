#ifndef SHARDD_TESTS_SERVER_JOB_HELD_MEMORY_H_
#define SHARDD_TESTS_SERVER_JOB_HELD_MEMORY_H_

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/device/device_memory.h"

namespace shardd {

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
  absl::StatusOr<std::unique_ptr<DeviceSlab>> TakeUpSlab(const std::string&, const std::vector<Part>&,
                                                         std::vector<UniqueFd>,
                                                         const std::vector<DeviceMemory*>&) override {
    return absl::UnimplementedError("not in this test");
  }
  absl::StatusOr<std::unique_ptr<PinnedMemory>> RegisterHost(const std::string&, void*, int64_t,
                                                             const std::vector<DeviceMemory*>&) override {
    return absl::UnimplementedError("not in this test");
  }
  absl::StatusOr<Room> GetRoom() override { return Room{int64_t{1} << 40, int64_t{1} << 40, 0}; }
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
      data_ = static_cast<char*>(mmap(nullptr, static_cast<size_t>(size_bytes_), PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
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

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_HELD_MEMORY_H_
