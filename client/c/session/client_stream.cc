#include "client/c/session/client_stream.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/c/host/quiet_thread.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kExitGrace = absl::Milliseconds(300);

// Never destroyed: the exit handler and late destructors of the trainer may come in any order.
struct LiveStreams {
  absl::Mutex mutex;
  std::vector<ClientStream*> streams ABSL_GUARDED_BY(mutex);
};
LiveStreams& Live() {
  static auto* const live = new LiveStreams;
  return *live;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClientStream>> ClientStream::Open(const std::shared_ptr<grpc::Channel>& channel,
                                                                 uint64_t session_id, const std::string& token,
                                                                 bool outlives_daemon) {
  std::unique_ptr<ClientStream> self(new ClientStream);
  self->outlives_daemon_ = outlives_daemon;
  self->stub_ = v1::TrainerService::NewStub(channel);
  self->stream_ = self->stub_->Session(&self->context_);
  v1::SessionRequest request;
  request.mutable_hello()->set_session_id(session_id);
  request.mutable_hello()->set_token(token);
  // A failed write means a broken stream; the reader then learns why.
  (void)self->stream_->Write(request);
  {
    absl::MutexLock lock(&Live().mutex);
    Live().streams.push_back(self.get());
  }
  const int error = StartQuietThread(&self->reader_, &ReaderMain, self.get());
  if (error != 0) {
    self->joined_ = true;
    return absl::ResourceExhaustedError(absl::StrCat("open session: no thread for its events (", strerror(error), ")"));
  }
  return self;
}

ClientStream::~ClientStream() {
  Close();
  absl::MutexLock lock(&Live().mutex);
  auto& streams = Live().streams;
  streams.erase(std::remove(streams.begin(), streams.end(), this), streams.end());
}

void* ClientStream::ReaderMain(void* self) {
  static_cast<ClientStream*>(self)->Read();
  return nullptr;
}

void ClientStream::Read() {
  v1::SessionEvent event;
  while (stream_->Read(&event)) {
    Take(&event);
  }
  grpc::Status end = stream_->Finish();
  absl::MutexLock lock(&mutex_);
  end_ = std::move(end);
  ended_ = true;
  over_.store(true, std::memory_order_release);
  changed_.NotifyAll();
}

void ClientStream::Take(v1::SessionEvent* event) {
  absl::MutexLock lock(&mutex_);
  switch (event->kind_case()) {
    case v1::SessionEvent::kAttached:
      attached_ = true;
      break;
    case v1::SessionEvent::kCommitted:
      committed_ = std::move(*event->mutable_committed());
      break;
    case v1::SessionEvent::kAborted:
      if (!aborted_.has_value()) {
        aborted_ = std::move(*event->mutable_aborted());
      }
      over_.store(true, std::memory_order_release);
      if (words_.has_value()) words_->Poison(aborted_->epoch());
      break;
    case v1::SessionEvent::kDetached:
      detached_ = true;
      break;
    case v1::SessionEvent::kWaiting:
      waiting_for_ = std::move(*event->mutable_waiting()->mutable_for_what());
      break;
    case v1::SessionEvent::kFullParams:
      full_params_ = std::move(*event->mutable_full_params());
      break;
    case v1::SessionEvent::kWords:
      if (words_.has_value()) words_->Store(event->words());
      break;
    case v1::SessionEvent::KIND_NOT_SET:
      break;  // an event of a later daemon; nothing here depends on it
  }
  changed_.NotifyAll();
}

absl::Status ClientStream::TellWords(const ToldWords& words) {
  {
    absl::MutexLock lock(&mutex_);
    words_ = words;
    if (aborted_.has_value()) words_->Poison(aborted_->epoch());
  }
  v1::SessionRequest request;
  request.mutable_tell_words();
  absl::MutexLock lock(&Live().mutex);
  if (joined_) return absl::UnavailableError("open session: this process is at its exit");
  SHARDD_ASSIGN_OR_RETURN(writer_,
                          StreamWriter::Start([this](const v1::SessionRequest& r) { return stream_->Write(r); }));
  writer_->Push(std::move(request));
  return absl::OkStatus();
}

absl::Status ClientStream::EndStatusLocked() const {
  if (aborted_.has_value()) {
    // A job that was closed is not there to attach to again; everything else is.
    if (aborted_->code() == static_cast<int>(absl::StatusCode::kNotFound)) {
      return absl::NotFoundError(absl::StrCat(aborted_->message(), "; attach anew for a new job of this name"));
    }
    if (aborted_->refused_ranks_size() > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(aborted_->message(), "; give all ranks the same description, and start them anew"));
    }
    return absl::AbortedError(
        absl::StrCat(aborted_->message(), "; call shardd_reattach and go on after step ", aborted_->committed_step()));
  }
  if (!ended_) {
    return absl::OkStatus();
  }
  if (closed_here_) {
    return absl::UnavailableError("session: it was closed by this process; call shardd_reattach");
  }
  const auto gone = [this](absl::string_view how) {
    return outlives_daemon_ ? absl::AbortedError(absl::StrCat("session: ", how,
                                                              ", and the next one goes on with the job; "
                                                              "call shardd_reattach and go on after the step it says"))
                            : absl::UnavailableError(absl::StrCat("session: ", how, "; call shardd_reattach"));
  };
  switch (end_.error_code()) {
    case grpc::StatusCode::OK:
      return gone("the daemon has closed it");
    // gRPC's own ways to say that the other side is gone.
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return gone(absl::StrCat("the daemon is gone (", end_.error_message(), ")"));
    default:
      return FromGrpcStatus(end_);
  }
}

absl::Status ClientStream::Await(const std::function<bool()>& done, Deadline deadline, const Interrupt& interrupt,
                                 const char* call) {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (changed_.Await(&mutex_, done, std::min(deadline, Deadline::In(Interrupt::kSlice))) || deadline.HasPassed()) {
        return absl::OkStatus();
      }
    }
    SHARDD_RETURN_IF_ERROR(interrupt.Check(call));
  }
}

absl::Status ClientStream::WaitAttached(Deadline deadline, const Interrupt& interrupt) {
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return attached_ || ended_ || aborted_.has_value(); };
  SHARDD_RETURN_IF_ERROR(Await(done, deadline, interrupt, "attach"));
  absl::MutexLock lock(&mutex_);
  if (!done()) {
    return absl::DeadlineExceededError("session: the daemon has not confirmed it in time");
  }
  const absl::Status status = EndStatusLocked();
  return attached_ && status.ok() ? absl::OkStatus() : status;
}

absl::Status ClientStream::EndStatus(Deadline deadline, const Interrupt& interrupt) {
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_ || aborted_.has_value(); };
  SHARDD_RETURN_IF_ERROR(Await(done, deadline, interrupt, "session"));
  absl::MutexLock lock(&mutex_);
  return EndStatusLocked();
}

absl::optional<v1::SessionEvent::Aborted> ClientStream::aborted() {
  absl::MutexLock lock(&mutex_);
  return aborted_;
}

std::string ClientStream::waiting_for() {
  absl::MutexLock lock(&mutex_);
  return waiting_for_;
}

absl::StatusOr<absl::optional<v1::SessionEvent::Committed>> ClientStream::WaitCommitted(int64_t step, int64_t parts,
                                                                                        Deadline deadline,
                                                                                        const Interrupt& interrupt) {
  const auto came = [this, step, parts]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return committed_.has_value() &&
           (committed_->step() > step || (committed_->step() == step && committed_->parts() >= parts));
  };
  const auto done = [this, &came]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_ || aborted_.has_value() || came(); };
  SHARDD_RETURN_IF_ERROR(Await(done, deadline, interrupt, "wait_step"));
  absl::MutexLock lock(&mutex_);
  if (came()) {
    return committed_;
  }
  return absl::nullopt;
}

absl::StatusOr<absl::optional<v1::SessionEvent::FullParams>> ClientStream::WaitFullParams(uint64_t number,
                                                                                          Deadline deadline,
                                                                                          const Interrupt& interrupt) {
  const auto done = [this, number]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return ended_ || aborted_.has_value() || (full_params_.has_value() && full_params_->number() >= number);
  };
  SHARDD_RETURN_IF_ERROR(Await(done, deadline, interrupt, "enter_full_params"));
  absl::MutexLock lock(&mutex_);
  if (full_params_.has_value() && full_params_->number() >= number) {
    return full_params_;
  }
  return absl::nullopt;
}

absl::Status ClientStream::Detach(bool finished, Deadline deadline, const Interrupt& interrupt) {
  v1::SessionRequest request;
  request.mutable_detach()->set_finished(finished);
  // Not followed by WritesDone: a closed write side would end the stream before the answer.
  if (writer_ != nullptr) {
    writer_->Push(std::move(request));
  } else {
    (void)stream_->Write(request);
  }
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return detached_ || ended_ || aborted_.has_value(); };
  SHARDD_RETURN_IF_ERROR(Await(done, deadline, interrupt, "detach"));
  absl::MutexLock lock(&mutex_);
  if (!done()) {
    return absl::DeadlineExceededError("detach: the daemon has not answered in time");
  }
  return detached_ ? absl::OkStatus() : EndStatusLocked();
}

void ClientStream::Close() {
  absl::MutexLock live_lock(&Live().mutex);
  if (joined_) {
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    closed_here_ = !ended_;
  }
  context_.TryCancel();
  pthread_join(reader_, nullptr);
  if (writer_ != nullptr) (void)writer_->End(Deadline::Never());
  joined_ = true;
}

void ClientStream::CancelAllAtExit() {
  const Deadline deadline = Deadline::In(kExitGrace);
  std::vector<pthread_t> ended;
  absl::MutexLock lock(&Live().mutex);
  for (ClientStream* stream : Live().streams) {
    stream->context_.TryCancel();
  }
  for (ClientStream* stream : Live().streams) {
    absl::MutexLock stream_lock(&stream->mutex_);
    const auto done = [stream]() ABSL_SHARED_LOCKS_REQUIRED(stream->mutex_) { return stream->ended_; };
    if (stream->changed_.Await(&stream->mutex_, done, deadline) && !stream->joined_ &&
        (stream->writer_ == nullptr || stream->writer_->End(deadline))) {
      stream->joined_ = true;
      ended.push_back(stream->reader_);
    }
  }
  for (const pthread_t reader : ended) {
    pthread_join(reader, nullptr);  // it is at its end already
  }
}

}  // namespace shardd
