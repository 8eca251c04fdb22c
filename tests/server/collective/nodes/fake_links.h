#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_FAKE_LINKS_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_FAKE_LINKS_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/peer/peer_links.h"

namespace shardd::testing {

// Links between nodes of this process: for each direction of each pair a queue and a thread for what is said, and
// another one for data. Bytes are read when they are delivered, not before, so who writes them too early is seen.
class FakeLinkWorld {
 public:
  explicit FakeLinkWorld(int nodes) : nodes_(nodes), events_(nodes) {
    for (int i = 0; i < 2 * nodes * nodes; ++i) {
      pipes_.push_back(std::make_unique<Pipe>());
    }
    for (int from = 0; from < nodes; ++from) {
      for (int to = 0; to < nodes; ++to) {
        for (const bool data : {false, true}) {
          if (from != to) {
            PipeOf(from, to, data).thread =
                std::thread([this, from, to, data] { Deliver(PipeOf(from, to, data), from, to); });
          }
        }
      }
    }
  }
  ~FakeLinkWorld() {
    for (std::unique_ptr<Pipe>& pipe : pipes_) {
      {
        absl::MutexLock lock(&pipe->mutex);
        pipe->stop = true;
      }
      if (pipe->thread.joinable()) {
        pipe->thread.join();
      }
    }
  }
  // Events run until the links go, which is before `events` goes. Links are there when it returns.
  std::unique_ptr<PeerLinks> Join(int node, PeerLinks::Events* events) {
    absl::MutexLock lock(&mutex_);
    events_[node] = events;
    for (int other = 0; other < nodes_; ++other) {
      if (other != node && events_[other] != nullptr) {
        events_[other]->OnUp(node);
        events->OnUp(other);
      }
    }
    return std::make_unique<Links>(this, node);
  }
  // Between two pieces of this direction.
  void SetDelay(int from, int to, absl::Duration delay) {
    Pipe& pipe = PipeOf(from, to, /*data=*/true);
    absl::MutexLock lock(&pipe.mutex);
    pipe.delay = delay;
  }

 private:
  struct Item {
    std::optional<v1::PeerMessage> message;  // else data
    v1::PeerData header;
    absl::string_view elements;
    std::function<void(absl::Status)> sent;
  };
  struct Pipe {
    absl::Mutex mutex;
    std::deque<Item> items;
    absl::Duration delay;
    bool stop = false;
    std::thread thread;
  };
  class Links final : public PeerLinks {
   public:
    Links(FakeLinkWorld* world, int node) : world_(world), node_(node) {}
    ~Links() override { world_->Leave(node_); }
    int node() const override { return node_; }
    int nodes() const override { return world_->nodes_; }
    void Send(int node, v1::PeerMessage message) override {
      Pipe& pipe = world_->PipeOf(node_, node, /*data=*/false);
      absl::MutexLock lock(&pipe.mutex);
      pipe.items.push_back({std::move(message), {}, {}, {}});
    }
    void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                  std::function<void(absl::Status)> sent) override {
      Pipe& pipe = world_->PipeOf(node_, node, /*data=*/true);
      absl::MutexLock lock(&pipe.mutex);
      pipe.items.push_back({std::nullopt, header, elements, std::move(sent)});
    }

   private:
    FakeLinkWorld* const world_;
    const int node_;
  };

  Pipe& PipeOf(int from, int to, bool data) { return *pipes_[2 * (from * nodes_ + to) + (data ? 1 : 0)]; }
  void Deliver(Pipe& pipe, int from, int to) {
    for (;;) {
      Item item;
      absl::Duration delay;
      {
        absl::MutexLock lock(&pipe.mutex);
        const auto some = [&pipe] { return pipe.stop || !pipe.items.empty(); };
        pipe.mutex.Await(absl::Condition(&some));
        if (pipe.items.empty()) {
          return;
        }
        item = std::move(pipe.items.front());
        pipe.items.pop_front();
        delay = pipe.delay;
      }
      if (delay > absl::ZeroDuration()) {
        absl::SleepFor(delay);
      }
      const std::string bytes(item.elements.data(), item.elements.size());
      absl::ReaderMutexLock lock(&mutex_);
      const bool there = events_[from] != nullptr && events_[to] != nullptr;
      if (item.message.has_value()) {
        if (there) {
          events_[to]->OnMessage(from, *std::move(item.message), nullptr);
        }
        continue;
      }
      item.sent(there ? absl::OkStatus() : absl::UnavailableError("no link"));
      if (there) {
        events_[to]->OnData(from, item.header, bytes);
      }
    }
  }
  void Leave(int node) {
    absl::MutexLock lock(&mutex_);
    events_[node] = nullptr;
    for (int other = 0; other < nodes_; ++other) {
      if (events_[other] != nullptr) {
        events_[other]->OnDown(node, absl::UnavailableError("its process has ended"));
      }
    }
  }

  const int nodes_;
  absl::Mutex mutex_;
  std::vector<PeerLinks::Events*> events_;  // by node; null: not there
  std::vector<std::unique_ptr<Pipe>> pipes_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_FAKE_LINKS_H_
