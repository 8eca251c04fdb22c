#include "client/c/session/stream_writer.h"

#include <string.h>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/c/host/quiet_thread.h"

namespace shardd {
namespace {

constexpr size_t kMessageBytes = 1 << 20;  // the daemon takes 4 MiB; one command has 1.25 MiB at most

}  // namespace

absl::StatusOr<std::unique_ptr<StreamWriter>> StreamWriter::Start(Stream stream) {
  auto self = absl::WrapUnique(new StreamWriter(std::move(stream)));
  if (const int error = StartQuietThread(&self->thread_, &ThreadMain, self.get()); error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("open session: no thread for its commands (", strerror(error), ")"));
  }
  return self;
}

void StreamWriter::Push(v1::Command command, bool urgent) {
  const size_t size_bytes = command.ByteSizeLong();
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  if (messages_.empty() || !messages_.back().request.has_commands() ||
      messages_.back().size_bytes + size_bytes > kMessageBytes) {
    messages_.emplace_back();
  }
  *messages_.back().request.mutable_commands()->add_commands() = std::move(command);
  messages_.back().size_bytes += size_bytes;
  urgent_ = urgent_ || urgent;
  if (urgent) changed_.NotifyAll();
}

void StreamWriter::Push(v1::SessionRequest request) {
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  messages_.push_back({std::move(request), 0});
  urgent_ = true;
  changed_.NotifyAll();
}

void StreamWriter::Flush() {
  absl::MutexLock lock(&mutex_);
  urgent_ = !messages_.empty();
  changed_.NotifyAll();
}

void* StreamWriter::ThreadMain(void* self) {
  static_cast<StreamWriter*>(self)->Write();
  return nullptr;
}

void StreamWriter::Write() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ending_ || !messages_.empty(); };
  const auto is_urgent = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ending_ || urgent_; };
  bool broken = false;
  while (true) {
    v1::SessionRequest request;
    {
      absl::MutexLock lock(&mutex_);
      if (broken) {  // the reader learns why
        ending_ = true;
        messages_.clear();
      }
      mutex_.Await(absl::Condition(&has_work));
      (void)changed_.Await(&mutex_, is_urgent, Deadline::In(kLinger));
      if (ending_) {
        ended_ = true;
        changed_.NotifyAll();
        return;
      }
      request.Swap(&messages_.front().request);
      messages_.pop_front();
      urgent_ = urgent_ && !messages_.empty();
    }
    broken = !stream_(request);
  }
}

bool StreamWriter::End(Deadline deadline) {
  absl::MutexLock lock(&mutex_);
  ending_ = true;
  changed_.NotifyAll();
  const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_; };
  if (!joined_ && changed_.Await(&mutex_, ended, deadline)) {
    pthread_join(thread_, nullptr);  // it is at its end: it takes no lock any more
    joined_ = true;
  }
  return joined_;
}

}  // namespace shardd
