// Clients that keep gRPC busy with frames that cost them nothing.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/faults/bad_input.h"
#include "tests/faults/hostile/http2_client.h"
#include "tests/testing/sanitizers.h"

namespace shardd::faults {
namespace {

constexpr int64_t kMostBytes = (testing::kSanitized ? 640 : 64) * (int64_t{1} << 20);
constexpr char kMethod[] = "/shardd.v1.JobsService/GetDaemon";

// Each of these clients, from its connection on, until `stop`.
struct Attack {
  const char* name;
  int clients;
  int most;  // of what it does, by each client; a daemon that takes it all at once shows it in its memory
  std::function<bool(http2::Client&, int i)> act;
};
std::ostream& operator<<(std::ostream& out, const Attack& attack) { return out << attack.name; }

class Http2Flood : public BadInput, public ::testing::WithParamInterface<Attack> {};

INSTANTIATE_TEST_SUITE_P(
    Of, Http2Flood,
    ::testing::Values(
        // 20,000 took 5 s of two cores, during which nobody was answered, and 360 MiB for good.
        Attack{"Resets", 1, 20'000,
               [](http2::Client& client, int i) {
                 const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
                 return client.Send(http2::Call(stream, kMethod) + http2::Reset(stream));
               }},
        Attack{"ResetsOnManyConnections", 20, 1'000,
               [](http2::Client& client, int i) {
                 const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
                 return client.Send(http2::Call(stream, kMethod) + http2::Reset(stream));
               }},
        Attack{"Pings", 20, 1'000,
               [](http2::Client& client, int) { return client.Send(http2::Frame(http2::kPing, 0, 0, "12345678")); }},
        Attack{"Settings", 20, 100'000,
               [](http2::Client& client, int) { return client.Send(http2::Frame(http2::kSettings, 0, 0)); }}),
    [](const auto& info) { return info.param.name; });

// A job of the same user is opened, and trains its 200 steps, while it lasts.
TEST_P(Http2Flood, StopsNobodyAndTakesNoMemory) {
  const Attack& attack = GetParam();
  StartDaemonWithJob();
  const int64_t before = ResidentBytes();
  {
    std::atomic<bool> stop = false;
    std::vector<std::unique_ptr<http2::Client>> clients;
    std::vector<std::thread> flooding;
    for (int c = 0; c < attack.clients; ++c) {
      clients.push_back(std::make_unique<http2::Client>(ConnectTo(socket())));
      flooding.emplace_back([&attack, &stop, &client = *clients.back()] {
        for (int i = 0; i < attack.most && !stop && attack.act(client, i); ++i) {
        }
      });
    }
    ExpectAllOk(RunRanks(other_.With({{"name", "victim"}, {"steps", "200"}})));
    stop = true;
    for (const auto& client : clients) client->Close();
    for (std::thread& thread : flooding) thread.join();
  }
  EXPECT_LT(ResidentBytes() - before, kMostBytes);
  ExpectJobIntact();
}

// As a connection that says nothing, it is not kept for ever.
TEST_F(BadInput, ASessionStreamWithoutHelloEnds) {
  StartDaemonWithJob();
  RawClient client(socket());
  RawStream silent(client.stub());
  ExpectStatus(silent.End(), absl::StatusCode::kDeadlineExceeded, "no hello within 5s");
  ExpectJobIntact();
}

}  // namespace
}  // namespace shardd::faults
