#include "server/relay/relay.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/clock/monotonic_now.h"
#include "server/observe/log.h"
#include "server/relay/http2_meter.h"
#include "server/relay/http2_refusal.h"
#include "server/relay/relay_account.h"
#include "server/relay/relay_connection.h"

namespace shardd {
namespace {

constexpr int kMovesPerTurn = 4;
// The most that one connection passes at once while others of its uid wait.
constexpr absl::Duration kMostPerTurn = absl::Milliseconds(5);
constexpr absl::Duration kLeastPause = absl::Milliseconds(1);
constexpr absl::Duration kLastWords = absl::Seconds(1);
constexpr size_t kMaxRefusals = 64;
// How long gRPC's last bytes may take to a client, once gRPC has closed.
constexpr absl::Duration kLastBytes = absl::Seconds(10);
constexpr size_t kMaxIdleAccounts = 1024;  // before those with full credit are forgotten

}  // namespace

class Relay::Impl {
 public:
  struct Arrival {
    UniqueFd client;
    UniqueFd inner;
    uint32_t uid;
    std::string refusal;
    std::shared_ptr<const void> place;
  };

  explicit Impl(const RelayOptions& options) : options_(options) {}
  ~Impl() {
    if (thread_.joinable()) {
      stopping_.store(true);
      Wake();
      thread_.join();
    }
  }

  absl::Status Start() {
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = 0;  // connections have ids from 1
    if (!epoll_.valid() || !wake_.valid() || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
      return absl::ErrnoToStatus(errno, "relay: cannot set up epoll");
    }
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), "shardd-relay");
    return absl::OkStatus();
  }

  void Post(Arrival arrival) {
    {
      absl::MutexLock lock(&mutex_);
      inbox_.push_back(std::move(arrival));
    }
    Wake();
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof(one)) < 0) {
      LogError("wake relay: eventfd write refused");
    }
  }

  void Run() {
    absl::Time last_words = absl::InfiniteFuture();
    while (true) {
      const absl::Time now = MonotonicNow();
      if (stopping_.load()) {
        last_words = std::min(last_words, now + kLastWords);
        if (connections_.empty() || now >= last_words) {
          break;
        }
      }
      RunTimers(now);
      // Connections with more to do go to the end of the line.
      for (size_t turns = runnable_.size(); turns > 0; --turns) {
        const uint64_t id = runnable_.front();
        runnable_.pop_front();
        if (const auto it = connections_.find(id); it != connections_.end()) {
          it->second->queued = false;
          Advance(id, *it->second, now);
        }
      }
      absl::Time wake = last_words;
      if (!timers_.empty()) {
        wake = std::min(wake, timers_.begin()->first);
      }
      epoll_event events[64];
      const int timeout_ms =
          !runnable_.empty() ? 0
          : wake == absl::InfiniteFuture()
              ? -1
              : static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(wake - now) + 1, 0, 1000));
      const int count = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
      for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == 0) {
          uint64_t value = 0;
          (void)!::read(wake_.get(), &value, sizeof(value));
          TakeArrivals();
        } else {
          Mark(events[i].data.u64, events[i].events);
        }
      }
    }
    connections_.clear();
  }

  void TakeArrivals() {
    std::vector<Arrival> arrivals;
    {
      absl::MutexLock lock(&mutex_);
      arrivals.swap(inbox_);
    }
    const absl::Time now = MonotonicNow();
    if (uids_.size() > kMaxIdleAccounts) {
      for (auto it = uids_.begin(); it != uids_.end();) {
        RelayUid& uid = it->second;
        it = uid.connections == 0 && uid.account.Credit(now) == options_.uid_burst ? uids_.erase(it) : std::next(it);
      }
    }
    for (Arrival& arrival : arrivals) {
      if (!arrival.refusal.empty() && refusals_ >= kMaxRefusals) {
        continue;  // closed without a word
      }
      const uint64_t id = next_id_++;
      auto made = std::make_unique<RelayConnection>(
          std::move(arrival.client), std::move(arrival.inner),
          RelayAccount(options_.connection_rate, options_.connection_burst, now), options_.buffer_size_bytes);
      RelayConnection& connection = *made;
      connection.place = std::move(arrival.place);
      connection.uid = arrival.uid;
      connection.of_uid =
          &uids_.try_emplace(arrival.uid, RelayUid{RelayAccount(options_.uid_rate, options_.uid_burst, now)})
               .first->second;
      ++connection.of_uid->connections;
      connection.refusal = std::move(arrival.refusal);
      const bool refused = !connection.refusal.empty();
      refusals_ += refused ? 1 : 0;
      connection.deadline = now + (refused ? options_.refusal_timeout : options_.first_call_timeout);
      timers_.emplace(connection.deadline, id);
      // Edge-triggered: the ways remember what is possible, and a pause does not change what is watched.
      Watch(connection.client.get(), id << 1);
      if (refused) {
        connection.down.Say(http2::ServerSettings());
      } else {
        Watch(connection.inner.get(), id << 1 | 1);
      }
      connections_.emplace(id, std::move(made));
    }
  }

  void Watch(int fd, uint64_t key) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.u64 = key;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void Mark(uint64_t key, uint32_t events) {
    const auto it = connections_.find(key >> 1);
    if (it == connections_.end()) {
      return;
    }
    RelayConnection& connection = *it->second;
    const bool gone = (events & (EPOLLHUP | EPOLLERR)) != 0;
    connection.client_gone = connection.client_gone || ((key & 1) == 0 && gone);
    if ((key & 1) != 0 && gone && !connection.grpc_gone) {
      connection.grpc_gone = true;  // a client that does not read is not waited for
      connection.deadline = MonotonicNow() + kLastBytes;
      timers_.emplace(connection.deadline, it->first);
    }
    RelayWay& from = (key & 1) == 0 ? connection.up : connection.down;
    RelayWay& to = (key & 1) == 0 ? connection.down : connection.up;
    from.readable = from.readable || (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    to.writable = to.writable || (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    Queue(it->first, connection);
  }

  void Queue(uint64_t id, RelayConnection& connection) {
    if (!connection.queued) {
      connection.queued = true;
      runnable_.push_back(id);
    }
  }

  void RunTimers(absl::Time now) {
    std::vector<std::pair<absl::Duration, uint64_t>> due;  // credit of its own account
    while (!timers_.empty() && timers_.begin()->first <= now) {
      const uint64_t id = timers_.begin()->second;
      timers_.erase(timers_.begin());
      const auto it = connections_.find(id);
      if (it == connections_.end()) {
        continue;
      }
      RelayConnection& connection = *it->second;
      connection.paused = false;
      if (connection.deadline <= now &&
          (connection.grpc_gone || !connection.refusal.empty() || connection.meter.last_stream() == 0)) {
        connection.dead = true;
      }
      due.emplace_back(connection.account.Credit(now), id);
    }
    // Among those of one uid that wait for its account, small requests come before floods.
    std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [credit, id] : due) {
      Queue(id, *connections_.find(id)->second);
    }
  }

  void Advance(uint64_t id, RelayConnection& connection, absl::Time now) {
    bool more = false;
    if (!connection.dead && connection.refusal.empty()) {
      more = MoveDown(connection);
      more = MoveUp(id, connection, now) || more;
    } else if (!connection.dead) {
      more = AdvanceRefusal(connection);
    }
    if (connection.dead) {
      refusals_ -= connection.refusal.empty() ? 0 : 1;
      if (--connection.of_uid->connections == 0 && connection.of_uid->account.Credit(now) == options_.uid_burst) {
        uids_.erase(connection.uid);
      }
      connections_.erase(id);
    } else if (more) {
      Queue(id, connection);
    }
  }

  static bool MoveDown(RelayConnection& connection) {
    RelayWay& way = connection.down;
    bool more = true;
    for (int i = 0; i < kMovesPerTurn && more; ++i) {
      size_t sent = 0;
      more = way.empty() ? way.Fill() : way.Send(way.end - way.begin, &sent);
    }
    if (way.empty() && way.eof) {
      connection.dead = true;  // gRPC has closed, and never closes one side alone
    }
    way.FreeBufferIfEmpty();
    return more;
  }

  bool MoveUp(uint64_t id, RelayConnection& connection, absl::Time now) {
    RelayWay& way = connection.up;
    connection.dead = connection.dead || (connection.paused && connection.client_gone);
    bool more = !connection.paused;
    for (int i = 0; i < kMovesPerTurn && more; ++i) {
      if (way.empty()) {
        more = way.Fill();
        continue;
      }
      if (connection.passed_bytes == 0 && !LetPass(id, connection, now)) {
        return false;
      }
      size_t sent = 0;
      more = way.Send(connection.passed_bytes, &sent);
      connection.passed_bytes = way.empty() ? 0 : connection.passed_bytes - sent;
    }
    if (way.empty() && way.eof && !way.discard) {
      ::shutdown(way.to, SHUT_WR);
      way.discard = true;
    }
    way.FreeBufferIfEmpty();
    return more && !connection.dead;
  }

  // Returns false if its own or its uid's account is empty: it waits.
  bool LetPass(uint64_t id, RelayConnection& connection, absl::Time now) {
    RelayWay& way = connection.up;
    RelayAccount& of_uid = connection.of_uid->account;
    const absl::Duration credit = std::min({connection.account.Credit(now), of_uid.Credit(now), kMostPerTurn});
    if (credit <= absl::ZeroDuration()) {
      connection.paused = true;
      connection.dead = connection.client_gone;  // nobody waits for the rest of a flood
      timers_.emplace(now + std::max({connection.account.Pause(), of_uid.Pause(), kLeastPause}), id);
      return false;
    }
    const Http2Meter::Passed passed =
        connection.meter.Pass(absl::string_view(way.buffer.get() + way.begin, way.end - way.begin), credit);
    connection.account.Pay(passed.price);
    of_uid.Pay(passed.price);
    connection.passed_bytes = passed.size_bytes;
    return true;
  }

  // Waits for the first call, answers it, and waits for the client to close.
  static bool AdvanceRefusal(RelayConnection& connection) {
    RelayWay& up = connection.up;
    RelayWay& down = connection.down;
    while (up.Fill()) {
      (void)connection.meter.Pass(absl::string_view(up.buffer.get(), up.end), absl::InfiniteDuration());
      up.end = 0;
      if (connection.meter.last_stream() != 0 && !up.discard) {
        up.discard = true;
        down.Say(http2::RefusalOf(connection.meter.last_stream(), connection.refusal));
      }
    }
    size_t sent = 0;
    while (!down.empty() && down.Send(down.end - down.begin, &sent)) {
    }
    if (up.discard && down.empty() && !down.eof) {
      ::shutdown(down.to, SHUT_WR);
      down.eof = true;
    }
    connection.dead = connection.dead || up.eof;
    return false;
  }

  // Constant after construction.
  const RelayOptions options_;
  UniqueFd epoll_;
  UniqueFd wake_;

  std::atomic<bool> stopping_ = false;
  absl::Mutex mutex_;
  std::vector<Arrival> inbox_ ABSL_GUARDED_BY(mutex_);

  // Used by the relay's thread.
  absl::flat_hash_map<uint64_t, std::unique_ptr<RelayConnection>> connections_;
  std::map<uint32_t, RelayUid> uids_;  // those with connections, or that have spent something
  std::multimap<absl::Time, uint64_t> timers_;
  std::deque<uint64_t> runnable_;
  uint64_t next_id_ = 1;
  size_t refusals_ = 0;

  std::thread thread_;  // last: starts when everything else exists
};

absl::StatusOr<std::unique_ptr<Relay>> Relay::Create(const RelayOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  if (absl::Status status = impl->Start(); !status.ok()) {
    return status;
  }
  return std::unique_ptr<Relay>(new Relay(std::move(impl)));
}

Relay::Relay(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Relay::~Relay() = default;

void Relay::Add(UniqueFd client, UniqueFd inner, uint32_t uid, std::shared_ptr<const void> place) {
  impl_->Post({std::move(client), std::move(inner), uid, "", std::move(place)});
}

void Relay::Refuse(UniqueFd client, const absl::Status& status) {
  impl_->Post({std::move(client), UniqueFd(), 0, http2::RefusalHeaders(status), nullptr});
}

}  // namespace shardd
