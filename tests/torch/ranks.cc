#include "tests/torch/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "tests/testing/http_get.h"

namespace shardd_test {

using shardd::testing::Child;

Ranks::Ranks(int devices, int nodes) : devices_(devices) {
  for (int node = 0; node < nodes; ++node) {
    if (nodes > 1) {
      nodes_.push_back("localhost:" + std::to_string(shardd::testing::FreePort()));
    }
    node_folders_.push_back(std::make_unique<shardd::testing::TempDir>());
    daemons_.emplace_back();
    StartDaemon(node);
  }
}

void Ranks::StartDaemon(int node) {
  const auto index = static_cast<size_t>(node);
  std::vector<std::string> flags;
  if (!nodes_.empty()) {
    flags.push_back("--peer_listen=" + nodes_[index]);
  }
  daemons_[index] = std::make_unique<shardd::testing::DaemonProcess>(node_folders_[index]->path(),
                                                                     "cpu:" + std::to_string(devices_), flags);
  EXPECT_TRUE(daemons_[index]->listened()) << shardd::testing::ReadWholeFile(daemons_[index]->log());
}

void Ranks::ReplaceDeadDaemon(int node) {
  EXPECT_EQ(daemons_[static_cast<size_t>(node)]->process().Wait(kWorkerLimit), 1000 + SIGKILL);
  StartDaemon(node);
}

void Ranks::Place(WorkerOptions* options) const {
  options->nodes = nodes_;
  const int ranks = options->ranks / static_cast<int>(daemons_.size());
  options->address = daemons_[static_cast<size_t>(options->rank / ranks)]->address();
}

std::string Ranks::OutOf(const std::string& name, int rank) const {
  return folder_.File(name + "." + std::to_string(rank));
}

Child Ranks::Start(WorkerOptions options) {
  if (options.out.empty()) {
    options.out = OutOf(options.job, options.rank);
  }
  return shardd::testing::Spawn({"/proc/self/exe", "--worker", ToJson(options)});
}

nlohmann::json Ranks::Read(const WorkerOptions& options) const {
  std::ifstream file(options.out.empty() ? OutOf(options.job, options.rank) : options.out);
  nlohmann::json result = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(result.is_object()) << "no result of rank " << options.rank;
  return result.is_object() ? result : nlohmann::json::object();
}

std::vector<nlohmann::json> Ranks::RunSharded(WorkerOptions options) {
  options.job = "job" + std::to_string(jobs_++);
  std::vector<Child> workers;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    Place(&options);
    workers.push_back(Start(options));
  }
  std::vector<nlohmann::json> results;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    EXPECT_EQ(workers[static_cast<size_t>(options.rank)].Wait(kWorkerLimit), 0) << "rank " << options.rank;
    results.push_back(Read(options));
  }
  return results;
}

nlohmann::json Ranks::RunReference(WorkerOptions options) {
  options.address.clear();
  options.out = folder_.File("reference");
  EXPECT_EQ(Start(options).Wait(kWorkerLimit), 0) << "reference";
  return Read(options);
}

}  // namespace shardd_test
