#include "tests/server/collective/nccl_node.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nodes/nccl_exchange.h"
#include "tests/fakes/nccl/nccl.h"
#include "tests/server/collective/node_values.h"
#include "tests/server/device/fake_cuda_world.h"

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
  Node(int node, int nodes, int fd) : node_(node), nodes_(nodes), fd_(fd), gpus_(/*delay_seed=*/7, NcclNodes::kRanks) {
    devices_ = gpus_.MakeAll();
    NcclExchange::Options options;
    options.node = node;
    options.nodes = nodes;
    for (int rank = 0; rank < NcclNodes::kRanks; ++rank) {
      options.devices.push_back(devices_[static_cast<size_t>(rank)].get());
      options.ordinals.push_back(rank);
    }
    options.send = [this](int to, v1::PeerMessage message) {
      NodePacket packet;
      packet.fixed.kind = NodePacket::Kind::kMessage;
      packet.fixed.node = to;
      packet.bytes = message.exchange().SerializeAsString();
      (void)packet.Send(fd_);
    };
    exchange_ = std::make_unique<NcclExchange>(NcclLibrary(fake_nccl::Table(), 22809), gpus_.driver(), options);
  }
  int Run() {
    while (const std::optional<NodePacket> packet = NodePacket::Receive(fd_)) {
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
    _exit(0);  // the test is over
  }

 private:
  void Sum(uint64_t generation, uint64_t sequence) {
    const int64_t numel = 3 + static_cast<int64_t>(sequence % 5) * 20'001;
    std::vector<NodePart> parts;
    for (int rank = 0; rank < NcclNodes::kRanks; ++rank) {
      auto* const data = static_cast<float*>(gpus_.memory()->allocate(static_cast<size_t>(numel) * 4, 64));
      FillNodeValues(node_, rank, sequence, data, numel);
      parts.push_back({rank, data, numel});
    }
    exchange_->AllReduce(generation, sequence, parts, absl::StrCat("sum ", sequence),
                         [this, generation, sequence, parts](absl::Status status) {
                           NodePacket packet;
                           packet.fixed.kind = NodePacket::Kind::kDone;
                           packet.fixed.generation = generation;
                           packet.fixed.sequence = sequence;
                           packet.fixed.code = static_cast<int>(status.code());
                           packet.bytes = std::string(status.message());
                           uint64_t digest = 0xcbf29ce484222325;
                           for (const NodePart& part : parts) {
                             if (!status.ok()) break;
                             packet.fixed.wrong += WrongNodeSums(nodes_, part.rank, sequence, part.data, part.numel);
                             digest = Digest(digest, part.data, part.numel);
                             packet.bytes = absl::StrCat(digest);
                           }
                           (void)packet.Send(fd_);
                         });
  }

  const int node_, nodes_, fd_;
  FakeCudaWorld gpus_;
  std::vector<std::unique_ptr<Device>> devices_;
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

int RunNcclNode(int argc, char** argv) {
  if (argc != 5 || std::strcmp(argv[1], kFlag) != 0) return -1;
  return Node(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])).Run();
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
