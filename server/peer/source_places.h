#ifndef SHARDD_SERVER_PEER_SOURCE_PLACES_H_
#define SHARDD_SERVER_PEER_SOURCE_PLACES_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace shardd {

// Counts the connections of each source and of all. Thread-safe.
class SourcePlaces : public std::enable_shared_from_this<SourcePlaces> {
 public:
  SourcePlaces(int most_of_one, int most) : most_of_one_(most_of_one), most_(most) {}
  // A place until the pointer is dropped; null: there is none left.
  std::shared_ptr<const void> Take(uint32_t source) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (total_ >= most_ || of_source_[source] >= most_of_one_) {
      return nullptr;
    }
    ++total_;
    ++of_source_[source];
    return std::shared_ptr<const void>(this, [all = shared_from_this(), source](const void*) { all->Leave(source); });
  }

 private:
  void Leave(uint32_t source) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --total_;
    if (const auto it = of_source_.find(source); --it->second == 0) {
      of_source_.erase(it);
    }
  }

  const int most_of_one_;
  const int most_;
  absl::Mutex mutex_;
  int total_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint32_t, int> of_source_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_SOURCE_PLACES_H_
