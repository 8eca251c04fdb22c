#include "tests/e2e/cluster.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "tests/e2e/ranks/blocks.h"

namespace shardd::e2e {

using testing::Child;
using testing::PollUntil;

namespace {

int CountEntries(const std::string& path) {
  int count = 0;
  std::error_code error;
  for (auto it = std::filesystem::recursive_directory_iterator(path, error);
       !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
    ++count;
  }
  return count;
}

int DescriptorsOf(pid_t pid) { return CountEntries(absl::StrCat("/proc/", pid, "/fd")); }
// What they are, for whoever has to find the one too many.
std::string TargetsOf(pid_t pid) {
  std::vector<std::string> targets;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    targets.push_back(std::filesystem::read_symlink(entry.path(), error).string());
  }
  std::sort(targets.begin(), targets.end());
  return absl::StrJoin(targets, ", ");
}

// That have the text in their arguments.
int ProcessesOf(const std::string& text) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    count += absl::StrContains(testing::ReadWholeFile(entry.path() / "cmdline"), text) ? 1 : 0;
  }
  return count;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Footprint& f) {
  return out << f.descriptors << " descriptors, " << f.shared_maps << " shared maps";
}

Cluster::~Cluster() {
  if (HasFailure()) {
    std::ifstream log(daemon_ == nullptr ? "" : daemon_->log());
    std::vector<std::string> lines;
    for (std::string line; std::getline(log, line);) lines.push_back(line);
    for (size_t i = lines.size() < 40 ? 0 : lines.size() - 40; i < lines.size(); ++i) {
      std::fprintf(stderr, "daemon.log: %s\n", lines[i].c_str());
    }
  }
  EndRanks();
}

void Cluster::EndRanks() {
  for (const pid_t group : groups_) kill(-group, SIGKILL);
  groups_.clear();
}

void Cluster::StartDaemon(const std::vector<std::string>& flags, const std::string& devices,
                          const std::vector<std::string>& environment, const std::string& program) {
  daemon_ = std::make_unique<testing::DaemonProcess>(folder_.path(), devices, flags, environment, program);
  ASSERT_TRUE(daemon_->listened());
  jobs_ = v1::JobsService::NewStub(grpc::CreateChannel(daemon_->address(), grpc::InsecureChannelCredentials()));
  ASSERT_EQ(DaemonStatus().pid(), daemon_->pid());
}

int Cluster::StopDaemon() {
  daemon_->process().Kill(SIGTERM);
  return daemon_->process().Wait();
}

bool Cluster::DaemonAlive() { return DaemonStatus().pid() == daemon_->pid(); }

Footprint Cluster::DaemonFootprint() const {
  Footprint footprint;
  const std::string proc = absl::StrCat("/proc/", daemon_->pid());
  footprint.descriptors = DescriptorsOf(daemon_->pid());
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    footprint.shared_maps += absl::StrContains(line, "memfd:") ? 1 : 0;
  }
  return footprint;
}

Cluster::Empty Cluster::EmptyWith(const Child& custodian) const {
  Empty empty = {DaemonFootprint(), DescriptorsOf(custodian.pid()), TargetsOf(daemon_->pid())};
  int same = 0;
  EXPECT_TRUE(PollUntil([&] {
    Empty now = {DaemonFootprint(), DescriptorsOf(custodian.pid()), TargetsOf(daemon_->pid())};
    const bool is_same = now.daemon <= empty.daemon && now.custodian_descriptors == empty.custodian_descriptors;
    same = is_same ? same + 1 : 0;
    if (!is_same) empty = std::move(now);
    return same == 100;
  }));
  return empty;
}

void Cluster::ExpectNothingLeft(const Empty& empty, const Child& custodian) const {
  EXPECT_TRUE(PollUntil([&] { return DaemonFootprint() <= empty.daemon; }))
      << DaemonFootprint() << ", want " << empty.daemon << ": " << TargetsOf(daemon_->pid()) << "; want "
      << empty.targets;
  const auto kept = [&] { return DescriptorsOf(custodian.pid()); };
  EXPECT_TRUE(PollUntil([&] { return kept() == empty.custodian_descriptors; }))
      << "the custodian has " << kept() << " descriptors, want " << empty.custodian_descriptors;
  const auto processes = [this] { return ProcessesOf(File("")); };
  EXPECT_TRUE(PollUntil([&] { return processes() == 2; })) << processes() << " processes, want 2";
}

std::string Cluster::Folder(const Args& args) const { return folder_.path() + "/" + args.Text("name", "job"); }

Child Cluster::StartRank(int rank, const Args& args) {
  const std::string folder = Folder(args);
  mkdir(folder.c_str(), 0700);
  // What the process before it has said, and was told.
  unlink(absl::StrCat(folder, "/rank.", rank).c_str());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().filename();
    if ((absl::StartsWith(file, "at.") || absl::StartsWith(file, "go.")) &&
        absl::EndsWith(file, absl::StrCat(".", rank))) {
      unlink(entry.path().c_str());
    }
  }
  const std::string spec = absl::StrCat(folder, "/spec.", rank);
  std::ofstream(spec) << SpecJson(args);
  std::vector<std::string> command = ranks_program_;
  command.insert(command.end(), {"--worker", absl::StrCat("rank=", rank), "folder=" + folder, "spec=" + spec,
                                 "address=" + daemon_->address()});
  for (const auto& [name, value] : args.values()) command.push_back(absl::StrCat(name, "=", value));
  Child child = testing::Spawn(
      command, {.environment = rank_environment_, .log = absl::StrCat(folder, "/log.", rank), .own_group = true});
  groups_.insert(child.pid());
  return child;
}

std::vector<TrainerReport> Cluster::RunRanks(const Args& given, const std::map<int, Args>& per_rank,
                                             const std::function<void()>& at_end) {
  const std::string end = absl::StrCat("end@", given.Int("steps", 50));
  const Args args = at_end == nullptr ? given : given.With({{"pause", end}});
  const int world = args.Int("world", 2);
  std::vector<Child> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const auto own = per_rank.find(rank);
    ranks.push_back(StartRank(rank, own == per_rank.end() ? args : args.With(own->second)));
  }
  if (at_end != nullptr) {
    for (int rank = 0; rank < world; ++rank) AwaitPause(args, "end", rank);
    at_end();
    for (int rank = 0; rank < world; ++rank) LetGo(args, "end", rank);
  }
  std::vector<TrainerReport> reports;
  for (int rank = 0; rank < world; ++rank) {
    EXPECT_EQ(ranks[rank].Wait(10 * testing::kLimit), 0)
        << "rank " << rank << ": " << testing::ReadWholeFile(absl::StrCat(Folder(args), "/log.", rank));
    reports.push_back(Report(args, rank));
  }
  return reports;
}

void Cluster::AwaitPause(const Args& args, const std::string& moment, int rank) {
  const std::string file = absl::StrCat(Folder(args), "/at.", moment, ".", rank);
  const std::string report = absl::StrCat(Folder(args), "/rank.", rank);
  ASSERT_TRUE(PollUntil([&] { return access(file.c_str(), F_OK) == 0 || access(report.c_str(), F_OK) == 0; }));
  EXPECT_EQ(access(file.c_str(), F_OK), 0) << "rank " << rank << " ended before it came to \"" << moment << "\"";
}

int64_t Cluster::TimeOf(const Args& args, const std::string& moment, int rank) const {
  int64_t ms = 0;
  std::ifstream(absl::StrCat(Folder(args), "/at.", moment, ".", rank)) >> ms;
  return ms;
}

void Cluster::LetGo(const Args& args, const std::string& moment, int rank) {
  std::ofstream(absl::StrCat(Folder(args), "/go.", moment, ".", rank)).flush();
}

namespace {

// One call with a limit.
template <typename Request, typename Response>
Response Call(v1::JobsService::Stub& stub,
              grpc::Status (v1::JobsService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& request) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + testing::kLimit));
  context.set_wait_for_ready(true);
  Response response;
  const grpc::Status status = (stub.*method)(&context, request, &response);
  return status.ok() ? response : Response();
}

}  // namespace

v1::Job Cluster::Job(const std::string& name) {
  const v1::ListJobsResponse response = Call(*jobs_, &v1::JobsService::Stub::ListJobs, v1::ListJobsRequest());
  for (const v1::Job& job : response.jobs()) {
    if (job.name() == name) return job;
  }
  return v1::Job();
}

std::vector<v1::Rank> Cluster::Ranks(const std::string& name) {
  v1::JobRef ref;
  ref.set_job(name);
  const v1::ListRanksResponse response = Call(*jobs_, &v1::JobsService::Stub::ListRanks, ref);
  return {response.ranks().begin(), response.ranks().end()};
}

std::vector<v1::Group> Cluster::Groups(const std::string& name) {
  v1::JobRef ref;
  ref.set_job(name);
  const v1::ListGroupsResponse response = Call(*jobs_, &v1::JobsService::Stub::ListGroups, ref);
  return {response.groups().begin(), response.groups().end()};
}

std::vector<v1::Event> Cluster::Events(const std::string& name) {
  v1::ListEventsRequest request;
  request.set_job(name);
  request.set_limit(1000);
  const v1::ListEventsResponse response = Call(*jobs_, &v1::JobsService::Stub::ListEvents, request);
  return {response.events().begin(), response.events().end()};
}

v1::Daemon Cluster::DaemonStatus() { return Call(*jobs_, &v1::JobsService::Stub::GetDaemon, v1::GetDaemonRequest()); }

bool Cluster::HasEvent(const std::string& name, const std::string& kind, const std::string& text) {
  const std::vector<v1::Event> events = Events(name);
  return std::any_of(events.begin(), events.end(), [&](const v1::Event& event) {
    return event.kind() == kind && absl::StrContains(event.text(), text);
  });
}

std::string SpecJson(const Args& args) {
  static const std::map<std::string, std::string> dtypes = {
      {"fp32", "DTYPE_FLOAT32"}, {"bf16", "DTYPE_BFLOAT16"}, {"fp16", "DTYPE_FLOAT16"}};
  auto text = [](const std::string& value) { return "\"" + value + "\""; };
  std::vector<std::pair<std::string, std::string>> fields = {
      {"trainersNeverWrite", args.Int("trainers_write") != 0 ? "false" : "true"}};
  auto add = [&](const char* arg, const char* field, const std::string& prefix) {
    if (!args.Text(arg).empty()) fields.push_back({field, text(prefix + args.Text(arg))});
  };
  add("strategy", "strategy", "STRATEGY_");
  add("layout", "layout", "LAYOUT_");
  add("unshard_mode", "unshardMode", "UNSHARD_MODE_");
  add("offload", "offload", "OFFLOAD_");
  add("backward_prefetch", "backwardPrefetch", "BACKWARD_PREFETCH_");
  if (args.Int("pools") != 0) fields.push_back({"unshardedPools", args.Text("pools")});
  if (args.Int("forward_prefetch") != 0) fields.push_back({"forwardPrefetch", "true"});
  if (args.Int("pass_copies") != 0) fields.push_back({"passCopies", "true"});
  if (args.Int("replica_copies") != 0) fields.push_back({"replicaCopies", "true"});
  if (args.Int("keep_every") != 0) fields.push_back({"keepEvery", args.Text("keep_every")});
  // 2: as the daemon fills it in.
  if (args.Int("trainer_sums") != 2)
    fields.push_back({"trainerSums", args.Int("trainer_sums") != 0 ? "true" : "false"});
  if (args.Int("strict_order") != 0) fields.push_back({"strictOrder", "true"});
  if (args.Int("allow_missing") != 0) fields.push_back({"allowMissingContribution", "true"});
  if (args.Int("silence_ms") != 0) fields.push_back({"silenceTimeoutMs", args.Text("silence_ms")});
  if (args.Int("grace_ms") != 0) fields.push_back({"graceMs", args.Text("grace_ms")});
  if (args.Int("group_size") != 0) fields.push_back({"shardGroupSize", args.Text("group_size")});
  if (!args.Text("groups").empty()) {  // "0,2;1,3"
    fields.push_back(
        {"shardGroups",
         absl::StrCat("[{\"ranks\":[", absl::StrReplaceAll(args.Text("groups"), {{";", "]},{\"ranks\":["}}), "]}]")});
  }
  if (!args.Text("nodes").empty()) {  // "localhost:4711,localhost:4712"
    fields.push_back({"nodes", absl::StrCat("{\"addresses\":[\"",
                                            absl::StrReplaceAll(args.Text("nodes"), {{",", "\",\""}}), "\"]}")});
  }
  std::string placement;
  for (const char* what : {"parameters", "gradients", "optimizer"}) {
    if (const std::string spread = args.Text(absl::StrCat("place_", what)); !spread.empty()) {
      absl::StrAppend(&placement, placement.empty() ? "" : ",", text(what), ":", text("SPREAD_" + spread));
    }
  }
  if (!placement.empty()) fields.push_back({"placement", "{" + placement + "}"});
  if (args.Double("divide") != 0) fields.push_back({"gradientDivideFactor", args.Text("divide")});
  auto precision = [&](const Precision& of) {
    std::string json = of.keep_low ? R"("keepLowPrecisionGrads":true)" : R"("keepLowPrecisionGrads":false)";
    if (!of.param_dtype.empty()) absl::StrAppend(&json, ",\"paramDtype\":", text(dtypes.at(of.param_dtype)));
    if (!of.reduce_dtype.empty()) absl::StrAppend(&json, ",\"reduceDtype\":", text(dtypes.at(of.reduce_dtype)));
    if (of.float8) json += R"(,"float8Gathers":true)";
    return "{" + json + "}";
  };
  fields.push_back({"mixedPrecision", precision(PrecisionOf(args, "of no group"))});
  auto own_precision = [&](absl::string_view module) {
    const std::string group = module.empty() ? "(root)" : std::string(module);
    return HasOwnPrecision(args, group) ? "\"mixedPrecision\":" + precision(PrecisionOf(args, group)) + "," : "";
  };
  std::string optimizer =
      absl::StrCat(R"("kind":"OPTIMIZER_KIND_)", absl::AsciiStrToUpper(args.Text("optimizer", "adamw")), "\"");
  if (!args.Text("trained").empty()) {
    optimizer =
        absl::StrCat(R"("kind":"OPTIMIZER_KIND_TRAINER","trainerStates":)", args.Text("trained") == "adam" ? 2 : 1);
  }
  if (args.Double("momentum") > 0) optimizer += R"(,"momentum":true)";
  if (args.Int("muon") != 0) {  // of two matrices, one of them tall; the others are as in "parts"
    optimizer += R"(,"groups":[{"fqns":["mid.w1","embed.weight"],"kind":"OPTIMIZER_KIND_MUON"},)"
                 R"({"fqns":["mid.b1","gain","bias"],"kind":"OPTIMIZER_KIND_SGD","momentum":true},)"
                 R"({"fqns":["mid.w2","head.u"],"kind":"OPTIMIZER_KIND_ADAM"}])";
  } else if (args.Int("adafactor") != 0) {  // of two matrices and a vector
    optimizer += R"(,"groups":[{"fqns":["mid.w1","embed.weight","bias"],"kind":"OPTIMIZER_KIND_ADAFACTOR"},)"
                 R"({"fqns":["mid.b1","gain"],"kind":"OPTIMIZER_KIND_SGD","momentum":true},)"
                 R"({"fqns":["mid.w2","head.u"],"kind":"OPTIMIZER_KIND_ADAM"}])";
  } else if (args.Int("parts") != 0) {
    absl::StrAppend(&optimizer, R"(,"groups":[{"fqns":["mid.w1","embed.weight","bias"],"kind":"OPTIMIZER_KIND_ADAMW)",
                    args.Int("two_states") != 0 ? "" : "_AMSGRAD", R"("},)");
    optimizer += R"({"fqns":["mid.b1","gain"],"kind":"OPTIMIZER_KIND_SGD","momentum":true},)"
                 R"({"fqns":["mid.w2","head.u"],"kind":"OPTIMIZER_KIND_ADAM"}])";
  }
  if (args.Int("two_groups") != 0) optimizer += R"(,"groups":[{"fqns":["mid.b1","gain"]}])";
  fields.push_back({"optimizer", "{" + optimizer + "}"});
  std::string config;
  for (const auto& [name, value] : fields) absl::StrAppend(&config, config.empty() ? "" : ",", text(name), ":", value);
  const bool marked = args.Int("manual_marks") != 0;
  return absl::StrCat(
      "{\"name\":", text(args.Text("name", "job")), ",\"worldSize\":", args.Int("world", 2),
      ",\"tree\":", args.Int("blocks") > 0 ? BlocksTreeJson(args) : TreeJson(marked, args.Int("filler"), own_precision),
      marked ? "" : R"(,"policy":{"classes":{"classNames":["Block"]}})", ",\"config\":{", config, "}}");
}

::testing::AssertionResult OneIsRefused(const std::vector<TrainerReport>& reports, const std::string& text) {
  ::testing::AssertionResult result = ::testing::AssertionFailure();
  for (const TrainerReport& report : reports) {
    if (report.code == static_cast<int>(Code::kFailedPrecondition) && absl::StrContains(report.message, text)) {
      return ::testing::AssertionSuccess();
    }
    result << "\n" << report.code << " " << report.message;
  }
  return result;
}

void ExpectAllOk(const std::vector<TrainerReport>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    EXPECT_EQ(reports[rank].code, 0) << "rank " << rank << ": " << reports[rank].message;
  }
}

void ExpectParity(const Args& args, const std::vector<TrainerReport>& reports, double tolerance,
                  const Reference::AsRead& as_read) {
  ExpectAllOk(reports);
  const Trained want = Reference(args, as_read).Run();
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const TrainerReport& got = reports[rank];
    ASSERT_EQ(got.losses.size(), want.losses[rank].size());
    double worst = 0;
    for (size_t step = 0; step < got.losses.size(); ++step) {
      worst = std::max(worst, std::abs(got.losses[step] - want.losses[rank][step]) / want.losses[rank][step]);
      if (args.Double("max_norm") > 0) {
        EXPECT_NEAR(got.norms[step], want.norms[step], 10 * tolerance * want.norms[step]) << "step " << step;
      }
    }
    EXPECT_LE(worst, tolerance) << "relative difference of a loss of rank " << rank;
    for (int p = 0; p < kParamCount; ++p) {
      ASSERT_EQ(got.values[p].size(), want.values[p].size()) << kParamNames[p];
      double largest = 0, difference = 0;
      for (int i = 0; i < kNumel[p]; ++i) {
        largest = std::max(largest, std::abs(double{want.values[p][i]}));
        difference = std::max(difference, std::abs(double{got.values[p][i]} - want.values[p][i]));
      }
      EXPECT_LE(difference / largest, tolerance) << kParamNames[p] << " on rank " << rank;
    }
  }
}

void ExpectSame(const std::vector<TrainerReport>& got, const std::vector<TrainerReport>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t rank = 0; rank < got.size(); ++rank) {
    for (int p = 0; p < kParamCount; ++p) {
      EXPECT_EQ(got[rank].values[p], want[rank].values[p]) << kParamNames[p] << " on rank " << rank;
    }
    // Ranks of other models report none. Their losses are of all elements.
    if (want[rank].values[0].empty()) {
      EXPECT_EQ(got[rank].losses, want[rank].losses) << "rank " << rank;
    }
    EXPECT_EQ(got[rank].bits, want[rank].bits) << "rank " << rank;
  }
}

}  // namespace shardd::e2e
