// The tests, or, started by them with --worker, one rank; with --launcher before it, a process that starts that rank,
// as torchrun does, and lives until it is killed.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "gtest/gtest.h"
#include "tests/e2e/ranks/blocks.h"
#include "tests/e2e/ranks/copy_trainer.h"
#include "tests/e2e/ranks/pass_trainer.h"
#include "tests/e2e/ranks/stream_trainer.h"
#include "tests/e2e/ranks/trainer.h"

namespace {

int Launch(char** worker) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("TORCHELASTIC_RUN_ID", "run", 1);
    execv("/proc/self/exe", worker);
    _exit(127);
  }
  waitpid(pid, nullptr, 0);
  while (true) pause();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "--launcher") == 0) return Launch(argv + 1);
  if (argc > 1 && std::strcmp(argv[1], "--worker") == 0) {
    const shardd::e2e::Args args = shardd::e2e::Args::Parse(argc, argv, 2);
    if (args.Text("model") == "copy") return shardd::e2e::CopyTrainer(args).Run();
    if (args.Text("model") == "pass") return shardd::e2e::PassTrainer(args).Run();
    if (args.Text("model") == "stream") return shardd::e2e::StreamTrainer(args).Run();
    return args.Text("model") == "blocks" ? shardd::e2e::BlocksTrainer(args).Run() : shardd::e2e::Trainer(args).Run();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
