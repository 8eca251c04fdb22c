#ifndef SHARDD_TESTS_SERVER_PEER_RECORDER_H_
#define SHARDD_TESTS_SERVER_PEER_RECORDER_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/peer/peer_links.h"
#include "tests/testing/poll.h"

namespace shardd::testing {

// What links tell, kept by node. Also sees to the promises of Events: one call at a time, messages between OnUp and
// OnDown alone, nothing behind the end.
class Recorder : public PeerLinks::Events {
 public:
  explicit Recorder(int nodes) : nodes_(nodes) {}

  absl::Status CheckHello(int node, const v1::PeerHello& hello) override {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    ++nodes_[node].hellos;
    nodes_[node].spec = hello.spec();
    return refusal_;
  }
  void OnUp(int node) override {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    Broken(nodes_[node].up, "OnUp twice");
    nodes_[node].up = true;
    ++nodes_[node].ups;
  }
  void OnMessage(int node, v1::PeerMessage message, PeerReceipt /*receipt*/) override {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    Broken(!nodes_[node].up, "a message without a link");
    nodes_[node].messages.push_back(std::move(message));
  }
  void OnDown(int node, absl::Status why) override {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    nodes_[node].up = false;
    nodes_[node].downs.push_back(std::move(why));
  }
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    Broken(!nodes_[node].up, "data without a link");
    nodes_[node].headers.push_back(header);
    nodes_[node].elements.append(elements.data(), elements.size());
    nodes_[node].data_bytes += static_cast<int64_t>(elements.size());
  }

  // A message or a piece, of which nothing is kept.
  void OnNothing(int node) {
    const Turn turn(this, node);
    absl::MutexLock lock(&mutex_);
    Broken(!nodes_[node].up, "a message or data without a link");
  }

  struct Node {
    bool up = false;
    int ups = 0;
    int hellos = 0;
    std::string spec;
    std::vector<v1::PeerMessage> messages;
    std::vector<absl::Status> downs;
    std::vector<v1::PeerData> headers;
    std::string elements;
    int64_t data_bytes = 0;
  };
  Node node(int node) const {
    absl::MutexLock lock(&mutex_);
    return nodes_[node];
  }
  void Refuse(absl::Status why) {
    absl::MutexLock lock(&mutex_);
    refusal_ = std::move(why);
  }
  bool WaitUp(int node) const {
    return Await(node, [](const Node& seen) { return seen.up; });
  }
  bool WaitDowns(int node, size_t count) const {
    return Await(node, [count](const Node& seen) { return seen.downs.size() >= count; });
  }
  bool WaitMessages(int node, size_t count) const {
    return Await(node, [count](const Node& seen) { return seen.messages.size() >= count; });
  }
  bool Await(int node, const std::function<bool(const Node&)>& condition) const {
    return PollUntil([&] {
      absl::MutexLock lock(&mutex_);
      return condition(nodes_[node]);
    });
  }
  // From here on no event may come.
  void Close() {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  std::string broken() const {
    absl::MutexLock lock(&mutex_);
    return broken_;
  }

 private:
  class Turn {
   public:
    Turn(Recorder* recorder, int node) : recorder_(recorder), node_(node) {
      absl::MutexLock lock(&recorder_->mutex_);
      recorder_->Broken(recorder_->turns_[node_]++ != 0, "two events of a node at a time");
      recorder_->Broken(recorder_->closed_, "an event behind the end");
    }
    ~Turn() {
      absl::MutexLock lock(&recorder_->mutex_);
      --recorder_->turns_[node_];
    }

   private:
    Recorder* const recorder_;
    const int node_;
  };
  void Broken(bool broken, const char* what) {
    if (broken) {
      absl::StrAppend(&broken_, what, "; ");
    }
  }

  mutable absl::Mutex mutex_;
  std::vector<Node> nodes_;
  std::vector<int> turns_ = std::vector<int>(64);
  absl::Status refusal_;
  std::string broken_;
  bool closed_ = false;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_PEER_RECORDER_H_
