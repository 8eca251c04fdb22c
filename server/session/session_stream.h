#ifndef SHARDD_SERVER_SESSION_SESSION_STREAM_H_
#define SHARDD_SERVER_SESSION_SESSION_STREAM_H_

#include <memory>

#include "absl/status/status.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// The daemon's end of a session stream. Thread-safe; after Finish or when the client is gone Send is a no-op.
class SessionStream {
 public:
  virtual ~SessionStream() = default;
  // Of `words` at most one event waits to be written: the next is merged into it.
  virtual void Send(v1::SessionEvent event) = 0;
  virtual void Finish(absl::Status status) = 0;
  // Held once more for each of the client's questions (OthersGradients) whose answer it has not read.
  const std::shared_ptr<void> questions = std::make_shared<int>();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SESSION_SESSION_STREAM_H_
