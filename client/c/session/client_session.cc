#include "client/c/session/client_session.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/shm/fd_channel.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// How long a waiter sleeps before it looks whether the stream still lives. An epoch that advances wakes it at once.
constexpr absl::Duration kSlice = Interrupt::kSlice;
constexpr absl::Duration kSpin = absl::Microseconds(20);
// For a program's stream to end what it has, when its session goes.
constexpr absl::Duration kDrainLimit = absl::Seconds(10);
// The epoch word is faster than the event that explains it.
constexpr absl::Duration kExplanationGrace = absl::Seconds(1);
// Records that need no action may pile up; from here on the daemon is woken to drain them before the ring is full.
constexpr uint64_t kDrainRecords = kRingRecords / 2;

absl::Status MapOne(std::vector<UniqueFd>& fds, SessionFd which, const char* name, int64_t size_bytes, bool writable,
                    MappedSlab* slab, bool keep_descriptor = false) {
  auto mapped = MappedSlab::Map(std::move(fds[which]), size_bytes, writable, keep_descriptor);
  if (!mapped.ok()) {
    return absl::Status(mapped.status().code(),
                        absl::StrCat("attach: cannot map ", name, ": ", mapped.status().message()));
  }
  *slab = *std::move(mapped);
  return absl::OkStatus();
}

// The daemon has just given this session out: when it does not know it any more, an epoch has passed in between.
absl::Status EndedWhileAttaching(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)
             ? absl::AbortedError(absl::StrCat("attach: the session ended before it was live: ", status.message()))
             : status;
}

}  // namespace

ClientSession::~ClientSession() {
  DelistStores();
  if (order_ == nullptr && sums_ == nullptr) {
    return;
  }
  stream_->Close();
  if (sums_ != nullptr && sums_->Stop(kDrainLimit)) {
    sums_ = nullptr;
  }
  if (order_ != nullptr && order_->Drain(/*release=*/true, kDrainLimit)) {
    order_ = nullptr;
  }
  if (order_ == nullptr && sums_ == nullptr) {
    return;
  }
  // A stream of the program, or the sums', still names all this: it stays for the rest of the process.
  struct Kept {
    MappedSlab session, daemon;
    DeviceSlabs device;
    std::unique_ptr<StreamOrder> order;
    std::unique_ptr<TrainerSums> sums;
  };
  // Its thread asks whether the session is over; that it is so is known by now.
  (void)new Kept{std::move(session_slab_), std::move(daemon_slab_), std::move(device_), std::move(order_),
                 std::move(sums_)};
}

absl::StatusOr<std::unique_ptr<ClientSession>> ClientSession::Open(const Target& target,
                                                                   const std::shared_ptr<grpc::Channel>& channel,
                                                                   const v1::AttachRankResponse& attach,
                                                                   const Options& options) {
  std::unique_ptr<ClientSession> self(new ClientSession);
  self->epoch_ = attach.epoch();
  self->id_ = attach.session_id();
  self->token_ = attach.token();
  self->rank_ = options.rank;
  self->timeout_ = options.timeout;
  self->interrupt_ = options.interrupt;
  SHARDD_ASSIGN_OR_RETURN(self->stream_, ClientStream::Open(channel, attach.session_id(), attach.token()));
  SHARDD_RETURN_IF_ERROR(EndedWhileAttaching(self->stream_->WaitAttached(options.deadline, *options.interrupt)));
  const auto fetch = [&](FdRange range) -> absl::StatusOr<std::vector<UniqueFd>> {
    auto fds = FetchSessionFds(
        target.socket_path, attach.session_id(), attach.token(), options.deadline - absl::Now(),
        [&] { return options.interrupt->Raised(); }, range);
    if (absl::IsCancelled(fds.status())) {
      return Interrupt::Cancelled("attach");
    }
    if (!fds.ok()) {
      // The session may have been ended meanwhile; that says more.
      const absl::Status ended = self->stream_->EndStatus(absl::Now() + kExplanationGrace, *options.interrupt);
      return EndedWhileAttaching(ended.ok() ? fds.status() : ended);
    }
    return fds;
  };
  SHARDD_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, fetch({}));
  SHARDD_RETURN_IF_ERROR(self->Map(std::move(fds), attach, *options.plan, fetch));
  if (options.plan->config.trainer_sums()) {
    SHARDD_RETURN_IF_ERROR(self->StartSums(target, *options.plan));
  }
  return self;
}

absl::Status ClientSession::Map(std::vector<UniqueFd> fds, const v1::AttachRankResponse& attach, const ShardPlan& plan,
                                const DeviceSlabs::Fetch& fetch) {
  if (fds.size() != kSessionFdCount) {
    return absl::InternalError(
        absl::StrCat("attach: wrong number of descriptors (got ", fds.size(), ", want ", int{kSessionFdCount}, ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(device_, DeviceSlabs::Map(attach, plan, fds, fetch));
  const SessionLayout layout = MakeSessionLayout(plan, /*slots_elsewhere=*/on_device());
  doorbell_ = std::move(fds[kFdDoorbell]);
  SHARDD_RETURN_IF_ERROR(
      MapOne(fds, kFdSessionMemory, "the session memory", layout.memory_bytes, /*writable=*/true, &session_slab_));
  SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdDaemonPage, "the daemon's page", layout.daemon_page_bytes,
                                /*writable=*/on_device(),
                                &daemon_slab_));  // DaemonPage says why
  memory_ = SessionMemoryView(session_slab_.data(), layout.ring_offset_bytes, layout.masks_offset_bytes);
  SHARDD_RETURN_IF_ERROR(MapOnHost(fds, plan));
  const auto base = [this](SessionFd which, const MappedSlab& host) {
    return device_.has(which) ? device_.at(which) : host.At<char>(0);
  };
  bases_ = {base(kFdShards, shards_), base(kFdParameters, parameters_), base(kFdPool, pool_),
            base(kFdGradients, gradients_),
            on_device() ? device_.at(kFdGradientSlots) : memory_.At<char>(layout.slots_offset_bytes)};
  trace_ring_ = memory_.At<TraceRecord>(layout.trace_offset_bytes);
  daemon_page_ = ReadOnlyDaemonPageView(daemon_slab_.data(), static_cast<int64_t>(plan.gradient_slots.size()),
                                        static_cast<int64_t>(plan.groups.size()));
  if (daemon_page_.page().magic != DaemonPage::kMagic) {
    return absl::InternalError(absl::StrCat("attach: the daemon's page has a wrong magic (got ",
                                            absl::Hex(daemon_page_.page().magic), ", want ",
                                            absl::Hex(DaemonPage::kMagic), ")"));
  }
  memory_.page().magic = ClientPage::kMagic;
  EnlistStores();
  return absl::OkStatus();
}

absl::Status ClientSession::MapOnHost(std::vector<UniqueFd>& fds, const ShardPlan& plan) {
  trainers_write_ = !plan.config.trainers_never_write();
  if (!device_.has(kFdShards)) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdShards, "the shards", plan.memory.shards_bytes, /*writable=*/trainers_write_,
                                  &shards_, /*keep_descriptor=*/true));
    window_ = plan.config.pass_copies();
    if (trainers_write_ && !window_ && !shards_.SetWritable(false)) {
      return absl::InternalError(absl::StrCat("attach: protect the shards: ", strerror(errno)));
    }
  }
  if (plan.memory.optimizer_bytes > 0 && !device_.has(kFdOptimizer)) {
    optimizer_fd_ = std::move(fds[kFdOptimizer]);
    optimizer_bytes_ = plan.memory.optimizer_bytes;
    optimizer_writable_ = plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  }
  // Of a GPU's rank, where they are the host's, it is the daemon that reads them.
  if (plan.memory.parameters_bytes > 0 && !on_device()) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdParameters, "the cast parameters", plan.memory.parameters_bytes,
                                  /*writable=*/false, &parameters_, /*keep_descriptor=*/true));
  }
  if (plan.memory.unsharded_pool_bytes > 0 && !device_.has(kFdPool)) {
    SHARDD_RETURN_IF_ERROR(
        MapOne(fds, kFdPool, "the unsharded pool", plan.memory.unsharded_pool_bytes, /*writable=*/false, &pool_));
  }
  if (plan.memory.gradients_bytes > 0 && !device_.has(kFdGradients)) {
    SHARDD_RETURN_IF_ERROR(MapOne(fds, kFdGradients, "the gradient shards", plan.memory.gradients_bytes,
                                  /*writable=*/true, &gradients_, /*keep_descriptor=*/true));
  }
  return absl::OkStatus();
}

bool ClientSession::SetShardsWritable(bool writable) {
  window_ = writable;
  return shards_.SetWritable(writable) &&
         (!optimizer_writable_ || optimizer_.data() == nullptr || optimizer_.SetWritable(writable));
}

bool ClientSession::WindowCovers(const void* address) const {
  const auto in = [address](const MappedSlab& slab) {
    const auto* begin = static_cast<const char*>(slab.data());
    return begin != nullptr && address >= begin && address < begin + slab.size_bytes();
  };
  return window_ && (in(shards_) || (optimizer_writable_ && in(optimizer_)));
}

char* ClientSession::optimizer() {
  if (device_.has(kFdOptimizer)) {
    return device_.at(kFdOptimizer);
  }
  if (optimizer_fd_.valid()) {
    absl::MutexLock lock(&stores_mutex_);
    if (auto mapped = MappedSlab::Map(std::move(optimizer_fd_), optimizer_bytes_, optimizer_writable_,
                                      /*keep_descriptor=*/true);
        mapped.ok() &&
        (!optimizer_writable_ || (stores_given_up_ ? mapped->MakePrivate() : mapped->SetWritable(window_)))) {
      optimizer_ = *std::move(mapped);
    }
    optimizer_fd_.reset();
  }
  return optimizer_.At<char>(0);
}

absl::Status ClientSession::Failure() {
  if (order_ != nullptr && order_->has_expired()) {
    stream_->Close();  // the others are told at once
    return order_->expired();
  }
  absl::Status status = stream_->EndStatus(absl::Now() + kExplanationGrace, interrupt());
  if (!status.ok()) {
    return status;
  }
  return absl::AbortedError(absl::StrCat("session: the epoch advanced (got ",
                                         TimelineEpoch(daemon_page_.page().epoch.load(std::memory_order_acquire)),
                                         ", want ", epoch_, "; rank=", rank_, "); call shardd_reattach"));
}

std::string ClientSession::Text(const WaitFor& reason) {
  return absl::StrCat(reason.call, reason.group == nullptr ? "" : absl::StrCat(" group \"", *reason.group, "\""), ": ",
                      reason.what);
}

absl::Status ClientSession::Deadline(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) const {
  const std::string whom = stream_->waiting_for();
  return absl::DeadlineExceededError(absl::StrCat(Text(reason), " did not come within ", absl::FormatDuration(timeout_),
                                                  " (got ", SequenceOf(word), ", want ", sequence, "; rank=", rank_,
                                                  ")", whom.empty() ? "" : absl::StrCat("; it waits for ", whom)));
}

absl::Status ClientSession::Slice(const TimelineWord& word, uint64_t sequence, absl::Time deadline) {
  const WaitResult result = TimelineWait(word, TimelineValue(epoch_, sequence), memory_.page().waiting,
                                         std::min(deadline, absl::Now() + kSlice));
  if (result == WaitResult::kReached) {
    // A later epoch satisfies every wait of this one.
    return Reached(word, sequence) ? absl::OkStatus() : Failure();
  }
  return Live();
}

bool ClientSession::Spin(const TimelineWord& word, uint64_t sequence) const {
  const absl::Time end = absl::Now() + kSpin;
  while (!Reached(word, sequence)) {
    if (absl::Now() >= end) {
      return false;
    }
    sched_yield();
  }
  return true;
}

absl::Status ClientSession::WaitBriefly(const TimelineWord& word, uint64_t sequence, const char* call) {
  const absl::Status status = Slice(word, sequence, absl::InfiniteFuture());
  return status.ok() && !Reached(word, sequence) ? interrupt().Check(call) : status;
}

absl::Status ClientSession::WaitSlow(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
  using Clock = std::chrono::steady_clock;  // a clock that is set must not end the wait, nor make it longer
  const Clock::time_point start = Clock::now();
  const Clock::time_point deadline = start + absl::ToChronoNanoseconds(timeout_);
  absl::Status status;
  do {
    const absl::Duration left = absl::FromChrono(deadline - Clock::now());
    status = Slice(word, sequence, absl::Now() + left);
    if (status.ok() && !Reached(word, sequence) && interrupt().Raised()) {
      status = absl::CancelledError(absl::StrCat(reason.call, ": interrupted (rank=", rank_, ")"));
    }
    if (status.ok() && !Reached(word, sequence) && Clock::now() >= deadline) {
      status = Deadline(word, sequence, reason);
    }
  } while (status.ok() && !Reached(word, sequence));
  ++counters_.waits;
  counters_.wait_ns += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
  return status;
}

absl::Status ClientSession::UseStream(void* stream) {
  if (order_ == nullptr) {
    StreamOrder::Options options;
    options.driver = &DeviceSlabs::driver();
    options.ordinal = device_.ordinal();
    options.rank = rank_;
    options.epoch = epoch_;
    options.client_page = &memory_.page();
    options.daemon_page = daemon_slab_.data();
    options.daemon_page_bytes = daemon_page_.size_bytes();
    options.timeout = timeout_;
    options.over = [this] {
      return stream_->over() || TimelineEpoch(daemon_page_.page().epoch.load(std::memory_order_acquire)) > epoch_;
    };
    SHARDD_ASSIGN_OR_RETURN(order_, StreamOrder::Create(options));
  }
  SHARDD_RETURN_IF_ERROR(order_->Use(static_cast<cu::Stream>(stream)));
  by_stream_ = true;
  return absl::OkStatus();
}

absl::Status ClientSession::WaitInStream(const TimelineWord& word, uint64_t sequence, const WaitFor& reason) {
  if (Reached(word, sequence)) {
    return absl::OkStatus();
  }
  if (stream_ordered() && needs_sums_ != 0) {
    SHARDD_RETURN_IF_ERROR(Wait(daemon_page_.page().reduced, needs_sums_, reason));
  }
  return stream_ordered() && order_->MayAwait() ? order_->Await(word, TimelineValue(epoch_, sequence), Text(reason))
                                                : WaitSlow(word, sequence, reason);
}

absl::StatusOr<uint64_t> ClientSession::SignalDone(const WaitFor& reason) {
  if (!by_stream_ || waits_on_host_) {
    return 0;
  }
  return order_->Signal(reason.call, [&]() -> absl::Status {
    return interrupt().Raised() ? absl::CancelledError(absl::StrCat(reason.call, ": interrupted (rank=", rank_, ")"))
                                : absl::OkStatus();
  });
}

std::function<absl::Status()> ClientSession::GoOn(const WaitFor& reason) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout_);
  return [this, reason, deadline]() -> absl::Status {
    SHARDD_RETURN_IF_ERROR(Live());
    SHARDD_RETURN_IF_ERROR(interrupt().Check(reason.call));
    if (std::chrono::steady_clock::now() < deadline) {
      return absl::OkStatus();
    }
    return absl::DeadlineExceededError(
        absl::StrCat(Text(reason), " within ", absl::FormatDuration(timeout_), " (rank=", rank_, ")"));
  };
}

void ClientSession::Wake() {
  if (daemon_page_.page().awake.load(std::memory_order_seq_cst) == 0) {
    RingDoorbell();
  }
}

void ClientSession::RingDoorbell() {
  const uint64_t one = 1;
  ssize_t written = 0;
  do {
    written = write(doorbell_.get(), &one, sizeof(one));
  } while (written < 0 && errno == EINTR);
  // EAGAIN: the counter is full, so the daemon has a wake-up pending anyway.
  ++counters_.doorbells;
}

absl::Status ClientSession::WaitSpace(uint64_t records, const WaitFor& reason) {
  const uint64_t end = submitted_ + std::min<uint64_t>(records, kRingRecords);
  if (end - consumed_seen_ <= kRingRecords) {
    return absl::OkStatus();
  }
  consumed_seen_ = std::min(SequenceOf(daemon_page_.page().consumed), submitted_);
  return end - consumed_seen_ <= kRingRecords ? absl::OkStatus() : WaitConsumed(end - kRingRecords, reason);
}

absl::Status ClientSession::Send(const CommandRecord& command, bool act, const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(WaitSpace(1, reason));
  CommandRecord& place = memory_.record(submitted_);
  place = command;
  place.sequence = submitted_;
  ++submitted_;
  const bool wake = act || submitted_ - rung_at_ >= kDrainRecords;
  if (!wake) {
    memory_.page().submitted.store(TimelineValue(epoch_, submitted_), std::memory_order_release);
    return absl::OkStatus();
  }
  // The daemon stores `awake` = 0 and then looks at `submitted` once more before it sleeps; both sides sequentially
  // consistent, so one of the two sees the other.
  memory_.page().submitted.store(TimelineValue(epoch_, submitted_), std::memory_order_seq_cst);
  rung_at_ = submitted_;
  Wake();
  return absl::OkStatus();
}

void ClientSession::Trace(TraceRecord record) {
  if (traced_ - daemon_page_.page().trace_taken.load(std::memory_order_acquire) >= kTraceRecords) {
    ++trace_lost_;
    return;
  }
  record.lost = static_cast<uint16_t>(std::min<uint64_t>(trace_lost_, std::numeric_limits<uint16_t>::max()));
  trace_lost_ = 0;
  trace_ring_[traced_ % kTraceRecords] = record;
  memory_.page().trace_written.store(++traced_, std::memory_order_release);
}

absl::Status ClientSession::WaitConsumed(uint64_t number, const WaitFor& reason) {
  if (number <= consumed_seen_) {
    return absl::OkStatus();
  }
  const TimelineWord& consumed = daemon_page_.page().consumed;
  if (!Reached(consumed, number)) {
    Wake();
    SHARDD_RETURN_IF_ERROR(WaitSlow(consumed, number, reason));
  }
  consumed_seen_ = std::max(consumed_seen_, std::min(SequenceOf(consumed), submitted_));
  return absl::OkStatus();
}

}  // namespace shardd
