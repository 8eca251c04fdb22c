#ifndef SHARDD_TESTS_FAKES_NCCL_WINDOWS_H_
#define SHARDD_TESTS_FAKES_NCCL_WINDOWS_H_

#include <cstddef>
#include <list>
#include <string>
#include <vector>

#include "server/collective/nccl/nccl_api.h"

namespace shardd::nccl {

// The windows of one clique: the nth registration of one member and the nth of every other are one window. Guarded by
// the clique's mutex.
class Windows {
 public:
  explicit Windows(int ranks) : registrations_(static_cast<size_t>(ranks)) {}
  // `out` gets the member's handle once all members have registered, which must stay there until then.
  void Register(int rank, void* buffer, size_t size_bytes, int flags, ncclWindow_t* out);
  // ncclInProgress until all members have registered what this one has; ncclInvalidArgument: what they have does not
  // fit.
  ncclResult_t State(int rank) const;
  // ncclInvalidUsage: some sum that was enqueued reads or writes there; ncclInvalidArgument: it is no window of this
  // member's.
  ncclResult_t Deregister(int rank, ncclWindow_t window);
  // For a sum over `buffers`, by rank, whose first `size_bytes` each are read: all outside of windows, or all at one
  // offset of one window.
  bool Fits(const std::vector<const void*>& buffers, size_t size_bytes) const;
  // While a sum names `buffer`.
  void Use(int rank, const void* buffer, int change);
  const std::string& why() const { return why_; }

 private:
  struct Entry {  // a member's
    char* buffer = nullptr;
    size_t size_bytes = 0;
    ncclWindow_t* out = nullptr;
    size_t number = 0;
    bool is_window = false;
    bool is_gone = false;
    int uses = 0;
  };
  const Entry* Find(int rank, const void* p) const;
  void Match();

  std::vector<std::list<Entry>> registrations_;  // by rank; entries keep their addresses, which are handles
  size_t matched_ = 0;                           // so many of every member are windows
  std::string why_;                              // what did not fit
};

}  // namespace shardd::nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_WINDOWS_H_
