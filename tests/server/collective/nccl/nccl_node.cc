#include "tests/server/collective/nccl/nccl_node.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/local/fan_out.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"
#include "server/device/device_memory.h"
#include "server/job/wait.h"
#include "tests/server/collective/nodes/node_values.h"

namespace shardd {
namespace {

constexpr char kFlag[] = "--nccl-node";
constexpr size_t kMostBytes = 64 << 10;

uint64_t Digest(uint64_t digest, const float* data, int64_t numel) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(data);
  for (size_t i = 0; i < static_cast<size_t>(numel) * sizeof(float); ++i) {
    digest = (digest ^ bytes[i]) * 0x100000001b3;
  }
  return digest;
}

class Node {
 public:
  Node(int node, int nodes, int fd, CudaWorld& world, const NcclLibrary& library)
      : node_(node), nodes_(nodes), fd_(fd), devices_(world.MakeAll()) {
    NcclExchange::Options options;
    options.node = node;
    options.nodes = nodes;
    for (const auto& device : devices_) {
      options.ordinals.push_back(static_cast<int>(options.devices.size()));
      options.devices.push_back(device.get());
      slabs_.push_back(*device->memory()->MakeSlab("staging", kSlots * kSlotBytes + NcclExchange::GreetingBytes(nodes),
                                                   {device->memory()}));
      options.greetings.push_back(slabs_.back()->data() + kSlots * kSlotBytes);
    }
    options.moves = true;
    options.send = [this](int to, v1::PeerMessage message) {
      NodePacket packet;
      packet.fixed.kind = NodePacket::Kind::kMessage;
      packet.fixed.node = to;
      packet.bytes = message.exchange().SerializeAsString();
      (void)packet.Send(fd_);
    };
    exchange_ = std::make_unique<NcclExchange>(library, world.driver(), options);
  }
  int Run() {
    while (true) {
      pollfd polled[] = {{fd_, POLLIN, 0}, {done_event_.get(), POLLIN, 0}};
      (void)poll(polled, 2, -1);
      if (polled[1].revents != 0) Tell();
      if (polled[0].revents == 0) continue;
      const std::optional<NodePacket> packet = NodePacket::Receive(fd_);
      if (!packet.has_value()) _exit(0);  // the test is over
      const NodePacket::Fixed& fixed = packet->fixed;
      v1::PeerMessage::Exchange message;
      switch (fixed.kind) {
        case NodePacket::Kind::kBegin:
          exchange_->Begin(fixed.generation);
          break;
        case NodePacket::Kind::kSum:
          Sum(fixed.generation, fixed.sequence);
          break;
        case NodePacket::Kind::kMessage:
          if (!message.ParseFromString(packet->bytes)) return 2;
          exchange_->OnMessage(fixed.node, message);
          break;
        case NodePacket::Kind::kDone:
          return 3;
      }
    }
  }

 private:
  static constexpr int64_t kSlots = 64;  // sums that are there at a time
  static constexpr int64_t kSlotBytes = int64_t{512} << 10;
  static constexpr int64_t kSaidBytes = 4096;
  static constexpr uint64_t kSumsOfAMove = 8;
  static int64_t Numel(uint64_t sequence) { return 3 + static_cast<int64_t>(sequence % 5) * 20'001; }
  char* Slot(size_t rank, uint64_t sequence) {
    return slabs_[rank]->data() + static_cast<int64_t>(sequence) % kSlots * kSlotBytes;
  }
  // Behind a slot's values: what a node says to the others, and what node `from` has said.
  char* Said(size_t rank, uint64_t sequence, int from) {
    return Slot(rank, sequence) + kSlotBytes - (nodes_ - from) * kSaidBytes;
  }
  static std::string Says(int node, size_t rank, uint64_t sequence) {
    return std::string(kSaidBytes, static_cast<char>(1 + 50 * node + 10 * static_cast<int>(rank) + sequence % 7));
  }
  static bool Moves(uint64_t sequence) { return sequence % kSumsOfAMove == 0; }
  // A sum, and beside some of them a move.
  void Sum(uint64_t generation, uint64_t sequence) {
    std::vector<NodePart> parts;
    std::vector<NodeMove> moves;
    std::vector<float> values(static_cast<size_t>(Numel(sequence)));
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      FillNodeValues(node_, static_cast<int>(rank), sequence, values.data(), Numel(sequence));
      char* const data = Slot(rank, sequence);
      if (!devices_[rank]->memory()->Write(data, values.data(), Numel(sequence) * 4).ok()) _exit(4);
      parts.push_back({static_cast<int>(rank), reinterpret_cast<float*>(data), Numel(sequence)});
      for (int other = 0; Moves(sequence) && other < nodes_; ++other) {
        const std::string says = other == node_ ? Says(node_, rank, sequence) : std::string(kSaidBytes, '\0');
        if (!devices_[rank]->memory()->Write(Said(rank, sequence, other), says.data(), kSaidBytes).ok()) _exit(4);
        if (other == node_) continue;
        const auto r = static_cast<int>(rank);
        moves.push_back({r, {other, Said(rank, sequence, node_), nullptr, kSaidBytes}});
        moves.push_back({r, {other, nullptr, Said(rank, sequence, other), kSaidBytes}});
      }
    }
    const auto done = JoinParts(Moves(sequence) ? 2 : 1, [this, generation, sequence](absl::Status status) {
      {
        absl::MutexLock lock(&mutex_);
        done_.push_back({generation, sequence, std::move(status)});
      }
      const uint64_t one = 1;
      (void)!write(done_event_.get(), &one, sizeof(one));
    });
    const auto sum = [&] { exchange_->AllReduce(generation, sequence, parts, absl::StrCat("sum ", sequence), done); };
    if (node_ % 2 == 0) sum();  // in other orders on other nodes
    if (Moves(sequence)) {
      exchange_->Move(generation, sequence / kSumsOfAMove, moves, absl::StrCat("move ", sequence), done);
    }
    if (node_ % 2 != 0) sum();
  }
  // Not where a sum is done: a thread of the driver's calls no function of it.
  void Tell() {
    uint64_t count = 0;
    (void)!read(done_event_.get(), &count, sizeof(count));
    std::vector<Ended> all;
    {
      absl::MutexLock lock(&mutex_);
      all.swap(done_);
    }
    for (const Ended& ended : all) {
      NodePacket packet;
      packet.fixed.kind = NodePacket::Kind::kDone;
      packet.fixed.generation = ended.generation;
      packet.fixed.sequence = ended.sequence;
      packet.fixed.code = static_cast<int>(ended.status.code());
      packet.bytes = std::string(ended.status.message());
      const int64_t numel = Numel(ended.sequence);
      std::vector<float> values(static_cast<size_t>(numel));
      uint64_t digest = 0xcbf29ce484222325;
      for (size_t rank = 0; ended.status.ok() && rank < devices_.size(); ++rank) {
        if (!devices_[rank]->memory()->Read(values.data(), Slot(rank, ended.sequence), numel * 4).ok()) _exit(4);
        packet.fixed.wrong += WrongNodeSums(nodes_, static_cast<int>(rank), ended.sequence, values.data(), numel);
        for (int from = 0; Moves(ended.sequence) && from < nodes_; ++from) {
          std::string said(kSaidBytes, '\0');
          const char* const at = Said(rank, ended.sequence, from);
          if (!devices_[rank]->memory()->Read(said.data(), at, kSaidBytes).ok()) _exit(4);
          packet.fixed.wrong += said == Says(from, rank, ended.sequence) ? 0 : 1;
        }
        digest = Digest(digest, values.data(), numel);
        packet.bytes = absl::StrCat(digest);
      }
      (void)packet.Send(fd_);
    }
  }

  struct Ended {
    uint64_t generation, sequence;
    absl::Status status;
  };
  const int node_, nodes_, fd_;
  const UniqueFd done_event_{eventfd(0, EFD_CLOEXEC)};
  const std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<DeviceSlab>> slabs_;
  absl::Mutex mutex_;
  std::vector<Ended> done_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<NcclExchange> exchange_;
};

}  // namespace

bool NodePacket::Send(int fd) const {
  std::string whole(reinterpret_cast<const char*>(&fixed), sizeof(fixed));
  whole += bytes;
  return send(fd, whole.data(), whole.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(whole.size());
}

std::optional<NodePacket> NodePacket::Receive(int fd) {
  std::string whole(kMostBytes, '\0');
  const ssize_t size = recv(fd, whole.data(), whole.size(), 0);
  if (size < static_cast<ssize_t>(sizeof(Fixed))) return std::nullopt;
  NodePacket packet;
  std::memcpy(&packet.fixed, whole.data(), sizeof(Fixed));
  packet.bytes = whole.substr(sizeof(Fixed), static_cast<size_t>(size) - sizeof(Fixed));
  return packet;
}

bool IsNcclNode(int argc, char** argv) { return argc == 5 && std::strcmp(argv[1], kFlag) == 0; }

int RunNcclNode(char** argv, CudaWorld& world, const NcclLibrary& library) {
  return Node(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), world, library).Run();
}

NcclNodes::NcclNodes(std::vector<std::string> hosts) : hosts_(std::move(hosts)), nodes_(hosts_.size()) {
  for (int node = 0; node < size(); ++node) Start(node);
}

void NcclNodes::Start(int node) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) != 0) std::abort();
  const UniqueFd theirs(fds[1]);
  Node& entry = nodes_[static_cast<size_t>(node)];
  entry.fd = UniqueFd(fds[0]);
  (void)fcntl(fds[0], F_SETFD, FD_CLOEXEC);
  entry.child = std::make_unique<testing::Child>(
      testing::Spawn({"/proc/self/exe", kFlag, absl::StrCat(node), absl::StrCat(size()), absl::StrCat(theirs.get())},
                     {.environment = {absl::StrCat("NCCL_HOSTID=", hosts_[static_cast<size_t>(node)])}}));
  pids_.push_back(entry.child->pid());
}

void NcclNodes::Kill(int node) {
  Node& entry = nodes_[static_cast<size_t>(node)];
  entry.child->Kill();
  (void)entry.child->Wait();
  entry.child.reset();
  entry.fd = UniqueFd();
}

void NcclNodes::Begin(int node, uint64_t generation) {
  NodePacket packet;
  packet.fixed.kind = NodePacket::Kind::kBegin;
  packet.fixed.generation = generation;
  (void)packet.Send(nodes_[static_cast<size_t>(node)].fd.get());
}

void NcclNodes::Sum(int node, uint64_t generation, uint64_t sequence) {
  NodePacket packet;
  packet.fixed.kind = NodePacket::Kind::kSum;
  packet.fixed.generation = generation;
  packet.fixed.sequence = sequence;
  (void)packet.Send(nodes_[static_cast<size_t>(node)].fd.get());
}

bool NcclNodes::IsDone(int node, uint64_t generation, uint64_t sequence) {
  return done_.contains({node, generation, sequence});
}

std::optional<NcclNodes::Done> NcclNodes::Await(int node, uint64_t generation, uint64_t sequence,
                                                absl::Duration limit) {
  for (const absl::Time end = absl::Now() + limit; !IsDone(node, generation, sequence);) {
    const absl::Duration left = end - absl::Now();
    if (left <= absl::ZeroDuration()) return std::nullopt;
    PassOnce(left);
  }
  return done_[{node, generation, sequence}];
}

void NcclNodes::PassOn(absl::Duration how_long) {
  for (const absl::Time end = absl::Now() + how_long; absl::Now() < end;) PassOnce(end - absl::Now());
}

void NcclNodes::PassOnce(absl::Duration limit) {
  std::vector<pollfd> polled;
  for (const Node& node : nodes_) polled.push_back({node.fd.get(), POLLIN, 0});  // -1 is passed over
  if (poll(polled.data(), polled.size(), static_cast<int>(absl::ToInt64Milliseconds(limit)) + 1) <= 0) return;
  for (int from = 0; from < size(); ++from) {
    if (polled[static_cast<size_t>(from)].revents == 0) continue;
    std::optional<NodePacket> packet = NodePacket::Receive(nodes_[static_cast<size_t>(from)].fd.get());
    if (!packet.has_value()) {
      nodes_[static_cast<size_t>(from)].fd = UniqueFd();
      continue;
    }
    NodePacket::Fixed& fixed = packet->fixed;
    if (fixed.kind == NodePacket::Kind::kDone) {
      done_[{from, fixed.generation, fixed.sequence}] = {fixed.code, fixed.wrong, packet->bytes};
    } else if (const Node& to = nodes_[static_cast<size_t>(fixed.node)]; !to.is_lost) {
      fixed.node = from;
      (void)packet->Send(to.fd.get());
    }
  }
}

}  // namespace shardd
