#include "tests/bench/hostile_neighbour.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "google/protobuf/util/json_util.h"
#include "tests/bench/bench_daemon.h"
#include "tests/faults/commands.h"
#include "tests/faults/hostile/http2_client.h"
#include "tests/faults/raw_client.h"

namespace shardd::bench {
namespace {

namespace http2 = faults::http2;

constexpr int kRanks = 60;
constexpr int kFloods = 20;
constexpr int kConnections = 10'000;
constexpr char kMethod[] = "/shardd.v1.JobsService/GetDaemon";

absl::Duration AttackTime() {
  const char* ms = std::getenv("SHARDD_BENCH_ATTACK_MS");
  return absl::Milliseconds(ms == nullptr ? 200 : std::atoi(ms));
}

// Parameters of the job that is asked about.
int Wide() {
  const char* params = std::getenv("SHARDD_BENCH_WIDE");
  return params == nullptr ? 100'000 : std::atoi(params);
}

std::string PathOf(const std::string& address) { return std::string(absl::StripPrefix(address, "unix:")); }

void Must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "attack: %s\n", what);
  std::_Exit(1);
}

// Sends what `next` makes, on several connections, for as long as the attack lasts.
void Flood(const std::string& address, const std::function<std::string(int)>& next) {
  std::vector<std::unique_ptr<http2::Client>> clients;
  std::vector<std::thread> flooding;
  for (int c = 0; c < kFloods; ++c) {
    clients.push_back(std::make_unique<http2::Client>(faults::ConnectTo(PathOf(address))));
    flooding.emplace_back([&next, &client = *clients.back()] {
      for (int i = 0; client.Send(next(i)); ++i) {
      }
    });
  }
  absl::SleepFor(AttackTime());
  for (const auto& client : clients) client->Close();  // ends a Send that waits
  for (std::thread& thread : flooding) thread.join();
}

// Ranks of a tiny job, until their Steps end them.
class HostileRanks {
 public:
  void Enter(const std::string& address) {
    clients_.clear();
    const v1::JobSpec spec = NextSpec();
    for (int rank = 0; rank < kRanks; ++rank) {
      clients_.push_back(std::make_unique<faults::RawClient>(PathOf(address)));
      Must(clients_.back()->Enter(spec, rank).ok(), "a rank did not attach");
      clients_.back()->Send(faults::Record(Opcode::kCommitParameters));
    }
    for (const auto& client : clients_) Must(client->Consumed(), "a rank's commit is not taken");
  }
  // Asks for what others gave, without end, of a job with many parameters.
  void EnterWide(const std::string& address) {
    clients_.clear();
    v1::JobSpec spec = NextSpec();
    const int wide = Wide();
    for (int i = 0; i < wide; ++i) {
      v1::Parameter& parameter = *spec.mutable_tree()->mutable_modules(0)->add_parameters();
      parameter.set_name(absl::StrCat("wide", i));
      parameter.set_dtype(v1::DTYPE_FLOAT32);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      clients_.push_back(std::make_unique<faults::RawClient>(PathOf(address)));
      Must(clients_.back()->Enter(spec, rank).ok(), "a rank did not attach");
    }
  }
  void Ask() {
    std::vector<std::thread> asking;
    std::atomic<int> asked = 0;
    const absl::Time end = absl::Now() + AttackTime();
    for (const auto& client : clients_) {
      asking.emplace_back([&asked, &client = *client, end] {
        while (absl::Now() < end) {
          v1::OthersGradientsRequest request;
          request.set_session_id(client.session().session_id());
          request.set_token(client.session().token());
          v1::OthersGradientsResponse response;
          grpc::ClientContext context;
          Must(client.stub().OthersGradients(&context, request, &response).ok(), "a question is not answered");
          ++asked;
        }
      });
    }
    for (std::thread& thread : asking) thread.join();
    if (std::getenv("SHARDD_BENCH_VERBOSE") != nullptr) std::fprintf(stderr, "%d questions\n", asked.load());
  }
  void Send() {
    std::string bytes = faults::GoodStep().SerializeAsString();
    while (bytes.size() + 2 <= static_cast<size_t>(kStepPayloadBytes)) bytes.append("\x78\x01");
    for (const auto& client : clients_) {
      std::memcpy(client->payload(), bytes.data(), bytes.size());
      client->Send(faults::Record(Opcode::kStep, 0, static_cast<int64_t>(bytes.size())));
    }
    Must(!clients_.front()->stream().End().ok(), "the first rank's Step is taken");
  }

 private:
  // Of a tiny job.
  v1::JobSpec NextSpec() {
    v1::JobSpec spec;
    Must(google::protobuf::util::JsonStringToMessage(GroupsSpec(absl::StrCat("hostile", jobs_++), kRanks, 1, 1024, ""),
                                                     &spec)
             .ok(),
         "the job is not described");
    return spec;
  }
  std::vector<std::unique_ptr<faults::RawClient>> clients_;
  int jobs_ = 0;
};

void Connect(const std::string& address) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const size_t most = std::min<rlim_t>(limit.rlim_cur, kConnections + 100) - 100;
  std::deque<UniqueFd> open;
  const absl::Time end = absl::Now() + AttackTime();
  for (int i = 0; i < kConnections && absl::Now() < end; ++i) {
    UniqueFd connection = faults::ConnectTo(PathOf(address));
    if (!connection.valid()) continue;  // the backlog is full
    const std::string preface = http2::Preface();
    (void)send(connection.get(), preface.data(), preface.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    open.push_back(std::move(connection));
    if (open.size() >= most) open.pop_front();
  }
}

}  // namespace

const std::map<std::string, Attack>& Attacks() {
  static auto* const ranks = new HostileRanks;
  const auto nothing = [](const std::string&) {};
  static const auto* const attacks = new std::map<std::string, Attack>{
      {"steps", {[](const std::string& address) { ranks->Enter(address); }, [](const std::string&) { ranks->Send(); }}},
      {"questions",
       {[](const std::string& address) { ranks->EnterWide(address); }, [](const std::string&) { ranks->Ask(); }}},
      {"resets",
       {nothing,
        [](const std::string& address) {
          Flood(address, [](int i) {
            const uint32_t stream = 2 * static_cast<uint32_t>(i) + 1;
            return http2::Call(stream, kMethod) + http2::Reset(stream);
          });
        }}},
      {"pings",
       {nothing,
        [](const std::string& address) {
          Flood(address, [](int) { return http2::Frame(http2::kPing, 0, 0, "12345678"); });
        }}},
      {"connections", {nothing, Connect}},
  };
  return *attacks;
}

}  // namespace shardd::bench
