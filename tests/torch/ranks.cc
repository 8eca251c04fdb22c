#include "tests/torch/ranks.h"

#include <gtest/gtest.h>

#include <fstream>

namespace shardd_test {

using shardd::testing::Child;

Ranks::Ranks(int devices) : daemon_(folder_.path(), "cpu:" + std::to_string(devices)) {
  EXPECT_TRUE(daemon_.listened()) << shardd::testing::ReadWholeFile(daemon_.log());
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
  options.address = daemon_.address();
  options.job = "job" + std::to_string(jobs_++);
  std::vector<Child> workers;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
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
