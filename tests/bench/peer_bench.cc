// Gradients between the daemons of two nodes, both in this process, over loopback: pieces on a link, and whole sums.
// Each beside plain TCP of the same run, which the counter of_tcp is a part of.

#include <arpa/inet.h>
#include <benchmark/benchmark.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/peer/peer_network.h"

namespace shardd {
namespace {

constexpr int64_t kBytes = int64_t{64} << 20;
constexpr int64_t kPieceBytes = PeerLinks::kMaxDataBytes;

void Must(bool ok, const char* what) {
  if (!ok) {
    perror(what);
    abort();
  }
}

// Bytes a second from one thread to another, the best of a few runs.
double TcpRate() {
  static const double rate = [] {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    Must(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0 &&
             getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0,
         "listen");
    const int out = socket(AF_INET, SOCK_STREAM, 0);
    Must(connect(out, reinterpret_cast<sockaddr*>(&address), length) == 0, "connect");
    const int in = accept(listener, nullptr, nullptr);
    std::string from(kPieceBytes, 'g');
    std::string to(kPieceBytes, '\0');
    double best = 0;
    for (int run = 0; run < 5; ++run) {
      const absl::Time begin = absl::Now();
      std::thread writer([&] {
        for (int64_t sent = 0; sent < kBytes;) {
          const ssize_t some = write(out, from.data(), std::min<int64_t>(kPieceBytes, kBytes - sent));
          Must(some > 0, "write");
          sent += some;
        }
      });
      for (int64_t got = 0; got < kBytes;) {
        const ssize_t some = read(in, to.data(), to.size());
        Must(some > 0, "read");
        got += some;
      }
      writer.join();
      best = std::max(best, static_cast<double>(kBytes) / absl::ToDoubleSeconds(absl::Now() - begin));
    }
    close(in);
    close(out);
    close(listener);
    return best;
  }();
  return rate;
}

class Node final : public PeerLinks::Events {
 public:
  absl::Status CheckHello(int, const v1::PeerHello&) override { return absl::OkStatus(); }
  void OnUp(int) override { up = true; }
  void OnMessage(int from, v1::PeerMessage message, PeerReceipt) override {
    if (answers) links->Send(from, std::move(message));
    ++messages;
  }
  void OnDown(int, absl::Status) override { up = false; }
  void OnData(int node, const v1::PeerData& header, absl::string_view elements) override {
    if (exchange != nullptr) {
      exchange->OnData(node, header, elements);
    } else {
      received += static_cast<int64_t>(elements.size());
    }
  }
  std::atomic<bool> up = false;
  std::atomic<bool> answers = false;  // messages go back as they came
  std::atomic<int64_t> messages = 0;
  std::atomic<int64_t> received = 0;
  std::unique_ptr<PeerNetwork> network;
  std::unique_ptr<PeerLinks> links;
  std::unique_ptr<PeerExchange> exchange;
};

class Pair {
 public:
  // `relay`: the port meters what it gets, as on the loopback without --peer_insecure.
  Pair(int64_t max_numel, bool relay) {
    std::vector<std::string> addresses;
    for (Node& node : nodes) {
      PeerNetwork::Options options;
      options.listen = "127.0.0.1:0";
      options.insecure = !relay;
      node.network = *PeerNetwork::Create(options);
      addresses.push_back(absl::StrCat("127.0.0.1:", node.network->port()));
    }
    for (int node = 0; node < 2; ++node) {
      nodes[node].links = *nodes[node].network->Join(
          {.job = "bench", .uid = 0, .node = node, .addresses = addresses, .spec = ""}, &nodes[node]);
    }
    while (!nodes[0].up || !nodes[1].up) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    for (Node& node : nodes) {  // nothing is sent yet
      node.exchange = max_numel > 0 ? *PeerExchange::Make(node.links.get(), max_numel, 2) : nullptr;
    }
  }
  ~Pair() {
    for (Node& node : nodes) {  // nothing is sent any more
      node.exchange.reset();
    }
    for (Node& node : nodes) {
      node.links.reset();
    }
  }
  Node nodes[2];
};

void BM_LinkPieces(benchmark::State& state) {
  const double tcp = TcpRate();
  Pair pair(0, state.range(0) != 0);
  const std::string piece(kPieceBytes, 'g');
  v1::PeerData header;
  header.set_numel(kPieceBytes / 4);
  std::atomic<int64_t> unsent = 0;
  int64_t total = 0;
  for (auto _ : state) {
    for (int64_t sent = 0; sent < kBytes; sent += kPieceBytes) {
      while (unsent >= 4) {
        std::this_thread::yield();
      }
      ++unsent;
      pair.nodes[0].links->SendData(1, header, piece, [&unsent](absl::Status) { --unsent; });
    }
    total += kBytes;
    while (pair.nodes[1].received < total) {
      std::this_thread::yield();
    }
  }
  state.SetBytesProcessed(total);
  state.counters["of_tcp"] = benchmark::Counter(static_cast<double>(total) / tcp, benchmark::Counter::kIsRate);
}
BENCHMARK(BM_LinkPieces)->ArgName("relay")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);

// One round trip on a link, as from Held to AllHold: a step over nodes is shown that much later than it is decided,
// less what the nodes update meanwhile.
void BM_LinkRoundTrip(benchmark::State& state) {
  Pair pair(0, state.range(0) != 0);
  pair.nodes[1].answers = true;
  v1::PeerMessage message;
  message.mutable_held()->set_step(1);
  int64_t answered = pair.nodes[0].messages;
  for (auto _ : state) {
    pair.nodes[0].links->Send(1, message);
    ++answered;
    while (pair.nodes[0].messages < answered) {
      std::this_thread::yield();
    }
  }
}
BENCHMARK(BM_LinkRoundTrip)->ArgName("relay")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);

// Each of two nodes sends and receives as many bytes as the sum has.
void BM_SumOverTwoNodes(benchmark::State& state) {
  const double tcp = TcpRate();
  const int64_t numel = state.range(0) << 18;
  Pair pair(numel, state.range(1) != 0);
  std::vector<float*> memory;
  for (int node = 0; node < 2; ++node) {
    memory.push_back(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(numel) * 4)));
    std::fill_n(memory.back(), numel, 0.0f);
  }
  uint64_t sequence = 0;
  for (auto _ : state) {
    absl::Mutex mutex;
    int left = 2;
    for (int node = 0; node < 2; ++node) {
      pair.nodes[node].exchange->AllReduce(1, sequence, {{0, memory[node], numel}}, "layer", [&](absl::Status status) {
        absl::MutexLock lock(&mutex);
        Must(status.ok(), "sum");
        --left;
      });
    }
    ++sequence;
    absl::MutexLock lock(&mutex);
    const auto done = [&left] { return left == 0; };
    mutex.Await(absl::Condition(&done));
  }
  const auto total = static_cast<double>(sequence) * static_cast<double>(numel) * 4;
  state.SetBytesProcessed(static_cast<int64_t>(total));
  state.counters["of_tcp"] = benchmark::Counter(total / tcp, benchmark::Counter::kIsRate);
  std::for_each(memory.begin(), memory.end(), &std::free);
}
BENCHMARK(BM_SumOverTwoNodes)
    ->ArgNames({"MiB", "relay"})
    ->Args({1, 0})
    ->Args({16, 0})
    ->Args({16, 1})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardd

BENCHMARK_MAIN();
