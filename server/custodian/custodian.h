#ifndef SHARDD_SERVER_CUSTODIAN_CUSTODIAN_H_
#define SHARDD_SERVER_CUSTODIAN_CUSTODIAN_H_

#include <sys/types.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/shm/socket_path.h"
#include "common/shm/unique_fd.h"

namespace shardd {

struct CustodyMessage;

// Owns the descriptors, and who may put and take: one connection at a time, whose end makes way for the next. The
// kernel closes the connection of a process that dies, so an owner that lives fences others, stopped or not. One
// thread.
class Custodian {
 public:
  struct Options {
    std::string path;                            // of the socket, which is made anew
    absl::Duration unowned = absl::Minutes(15);  // what nobody owns for so long is freed
    bool embedded = false;                       // ends when nobody owns it and it has nothing of a job
  };
  // ALREADY_EXISTS: a custodian listens at the path.
  static absl::StatusOr<std::unique_ptr<Custodian>> Create(Options options);

  // Serves until `stop` becomes readable.
  void Run(int stop);

 private:
  // No client of its uid is an enemy, but a mad one takes no more than this.
  static constexpr size_t kMostConnections = 16;
  static constexpr size_t kMostObjects = 65536;
  // Descriptors for all else, so that a full custodian still answers, and admits the next owner.
  static constexpr size_t kDescriptorsForOthers = 2 * kMostConnections;
  struct Connection {
    UniqueFd socket;
    pid_t pid = 0;
    int version = 0;  // of its messages, since kOwn
  };

  Custodian(Options options, std::unique_ptr<SocketPath> socket, size_t most_objects)
      : options_(std::move(options)), socket_(std::move(socket)), most_objects_(most_objects) {}
  void Accept();
  // False: the connection is over.
  bool Serve(Connection& connection);
  absl::Status Own(Connection& connection, const CustodyMessage& request);
  absl::Status Do(Connection& connection, const CustodyMessage& request, UniqueFd fd);
  absl::Status List(const Connection& connection);
  void Close(const Connection& connection);
  void FreeUnowned();
  bool HasJobs() const;

  const Options options_;
  const std::unique_ptr<SocketPath> socket_;
  const size_t most_objects_;
  std::list<Connection> connections_;
  const Connection* owner_ = nullptr;
  absl::Time unowned_since_ = absl::InfiniteFuture();  // of a clock that nobody sets
  absl::Time ends_;                                    // not before: an embedded one waits for its first owner
  std::map<std::pair<uint64_t, std::string>, UniqueFd> objects_;  // by job and name
};

}  // namespace shardd

#endif  // SHARDD_SERVER_CUSTODIAN_CUSTODIAN_H_
