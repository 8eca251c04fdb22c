#ifndef SHARDD_SERVER_CUSTODIAN_CUSTODY_H_
#define SHARDD_SERVER_CUSTODIAN_CUSTODY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "server/custodian/wire.h"

namespace shardd {

// What a job's description is kept as. It is handed over behind everything else of the job: without it there is none.
inline constexpr char kCustodyJobName[] = "job";
// What is readable when the daemon writes jobs' memory no more: a pidfd of it. Of job 0.
inline constexpr char kCustodyDaemonName[] = "daemon";

// The daemon's side of custody. Owns the connection, and a descriptor of all that was handed over, so that a custodian
// that was started anew gets it again. Thread-safe; every call may block, for a few seconds at most: not for the loop.
class Custody {
 public:
  // By job and name; job 0: the daemon's own.
  using Objects = std::map<std::pair<uint64_t, std::string>, UniqueFd>;

  // After `limit`: UNAVAILABLE: nobody listens there. FAILED_PRECONDITION: a daemon still owns what is kept there.
  // RESOURCE_EXHAUSTED: this process may open too few descriptors for what is kept, which stays there.
  // `program`: where nobody listens, now or later, it is started there, and ends by itself (--embedded); empty: nothing
  // is.
  static absl::StatusOr<std::unique_ptr<Custody>> Connect(std::string path, absl::Duration limit,
                                                          std::string program = "");

  // UNAVAILABLE: nobody listens at the path. Asks for nothing.
  static absl::Status Check(const std::string& path);
  // As Connect, to a custodian that goes with the daemon which listens at `socket`: shardd.sock has
  // shardd-custody.sock, and the program beside this one.
  static absl::StatusOr<std::unique_ptr<Custody>> ConnectOwn(absl::string_view socket, absl::Duration limit);

  // What was kept when this began. Once; later it is empty.
  Objects TakeUp() ABSL_LOCKS_EXCLUDED(mutex_);
  // Of a job: what is kept now. RESOURCE_EXHAUSTED: this process has too few descriptors left.
  absl::StatusOr<Objects> HeldOf(uint64_t job) ABSL_LOCKS_EXCLUDED(mutex_);
  // `fd` is borrowed. Returns when it is kept. UNAVAILABLE: there is no custodian. RESOURCE_EXHAUSTED: it is full, or
  // this process has no descriptor left; what was there under the name stays.
  absl::Status Put(uint64_t job, absl::string_view name, int fd) ABSL_LOCKS_EXCLUDED(mutex_);
  void Drop(uint64_t job) ABSL_LOCKS_EXCLUDED(mutex_);
  // Hands everything over again where the custodian is another one. To be called every second or so.
  void Review() ABSL_LOCKS_EXCLUDED(mutex_);
  // Another daemon may own what is kept, and does not wait for this one's end. From here on every Put is UNAVAILABLE,
  // and Drop and Review do nothing.
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Custody(std::string path, std::string program) : path_(std::move(path)), program_(std::move(program)) {}
  // A connected socket, or why there is none.
  absl::StatusOr<UniqueFd> Dial() const;
  absl::Status StartProgram() const;
  absl::Status ConnectLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ListLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PutAllLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One request and its answer; the connection is over where either is missing. Both are of the version that kOwn has
  // agreed on.
  absl::Status CallLocked(CustodyMessage request, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OwnLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckVersionLocked(const CustodyMessage& answer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string program_;
  bool program_fails_ ABSL_GUARDED_BY(mutex_) = false;  // and is not started again
  bool said_ ABSL_GUARDED_BY(mutex_) = false;           // that nothing is kept at the moment
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Mutex mutex_;
  UniqueFd socket_ ABSL_GUARDED_BY(mutex_);
  int version_ ABSL_GUARDED_BY(mutex_) = 0;  // of messages on the socket
  Objects taken_ ABSL_GUARDED_BY(mutex_);
  Objects held_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> undropped_ ABSL_GUARDED_BY(mutex_);  // jobs of whose end no custodian has heard
};

}  // namespace shardd

#endif  // SHARDD_SERVER_CUSTODIAN_CUSTODY_H_
