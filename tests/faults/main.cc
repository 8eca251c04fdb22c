// The tests, or, started by them with --worker, one rank; or, with half_attach=1, a trainer that comes no further than
// AttachRank.

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iostream>

#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "tests/e2e/ranks/trainer.h"
#include "tests/faults/own_mounts.h"
#include "tests/faults/raw_client.h"

namespace {

int HalfAttach(const shardd::e2e::Args& args) {
  shardd::v1::JobSpec spec;
  std::ifstream file(args.Text("spec"));
  const std::string json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!google::protobuf::util::JsonStringToMessage(json, &spec).ok()) return 1;
  shardd::faults::RawClient client(args.Text("address").substr(5));
  const auto job = client.Open(spec);
  const absl::Status attached = job.ok() ? client.Attach(job->job_id(), args.Int("rank")).status() : job.status();
  if (!attached.ok()) {
    std::cerr << attached << std::endl;
    return 1;
  }
  std::ofstream(args.Text("folder") + "/at.half." + args.Text("rank")).flush();
  while (true) pause();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--worker") == 0) {
    const shardd::e2e::Args args = shardd::e2e::Args::Parse(argc, argv, 2);
    return args.Int("half_attach") != 0 ? HalfAttach(args) : shardd::e2e::Trainer(args).Run();
  }
  shardd::faults::EnterOwnMountsIfTold(&argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
