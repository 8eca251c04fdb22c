// main of the tests. With --program=NAME it is a trainer process that a test started.

#include <errno.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "client/cpp/shardd.h"
#include "common/clock/deadline.h"
#include "common/plan/session_layout.h"
#include "tests/client/client_fixture.h"

namespace shardd::testing_client {
namespace {

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

// Attaches to TEST_ADDRESS (empty: found or started) as TEST_RANK of a job of TEST_WORLD ranks, with
// TEST_DEVICE_MEMORY=1 on GPUs.
Status AttachFromEnvironment(std::unique_ptr<Job>* job) {
  Job::Options options;
  v1::JobSpec spec = SmallSpec("programs", atoi(Variable("TEST_WORLD").c_str()));
  if (Variable("TEST_DEVICE_MEMORY") == "1") {
    options.device_memory = true;
    spec.mutable_config()->set_trainers_never_write(true);
  }
  options.spec_json = ToJson(spec);
  options.rank = atoi(Variable("TEST_RANK").c_str());
  options.address = Variable("TEST_ADDRESS");
  const std::string timeout_ms = Variable("TEST_TIMEOUT_MS");
  options.timeout_ms = timeout_ms.empty() ? absl::ToInt64Milliseconds(10 * kLimit)  // no test waits for it
                                          : atoi(timeout_ms.c_str());
  return Job::Attach(options, job);
}

int Failed(const Status& status) {
  fprintf(stderr, "code %d: %s\n", static_cast<int>(status.code()), status.message().c_str());
  return 1;
}

// Leaves main while attached and unsharded, as a script that ends without a word.
int ExitAttached() {
  static auto* job = new std::unique_ptr<Job>;  // never deleted: nobody detaches
  if (Status status = AttachFromEnvironment(job); !status.ok()) {
    return Failed(status);
  }
  printf("attached\n");
  return 0;
}

// The same with a static object whose destructor detaches after the exit handlers have run.
int ExitWithStaticJob() {
  static std::unique_ptr<Job> job;
  if (Status status = AttachFromEnvironment(&job); !status.ok()) {
    return Failed(status);
  }
  printf("attached\n");
  return 0;
}

// Attaches, says where, and stays until its standard input ends.
int Stay() {
  std::unique_ptr<Job> job;
  if (Status status = AttachFromEnvironment(&job); !status.ok()) {
    return Failed(status);
  }
  printf("%s %d\n", job->info().address, job->info().created);
  fflush(stdout);
  while (getchar() != EOF) {
  }
  if (Status status = job->Finish(); !status.ok()) {
    return Failed(status);
  }
  return 0;
}

// Until a test says so. Not Eventually, which goes by the wall clock.
bool AwaitGo() {
  for (const Deadline end = Deadline::In(kLimit); access(Variable("TEST_GO").c_str(), F_OK) != 0; usleep(1000)) {
    if (end.HasPassed()) return false;
  }
  return true;
}

// One step of plain SGD, with gradients of (rank + 1) * step / 4.
Status TrainStep(Job* job, int64_t step) {
  const shardd_job_info info = job->info();
  Status status;
  for (int32_t group = 0; status.ok() && group < info.group_count; ++group) {
    status = job->group(group).Unshard(SHARDD_FORWARD);
    if (status.ok()) status = job->group(group).Reshard();
  }
  for (int32_t group = info.group_count - 1; status.ok() && group >= 0; --group) {
    ParameterGroup of = job->group(group);
    status = of.Unshard(SHARDD_BACKWARD);
    if (status.ok()) status = of.WaitGradientSlot();
    const shardd_group_info params = of.info();
    for (int32_t i = 0; status.ok() && i < params.param_count; ++i) {
      if (auto* gradient = static_cast<float*>(job->gradient_data(params.params[i])); gradient != nullptr) {
        std::fill_n(gradient, job->parameter_info(params.params[i]).numel,
                    0.25f * static_cast<float>((info.rank + 1) * step));
      }
    }
    if (status.ok()) status = of.SubmitGradients();
    if (status.ok()) status = of.Reshard();
  }
  if (status.ok()) status = job->BackwardDone(true);
  if (status.ok()) status = job->Step({Sgd(0.125)});
  if (status.ok()) status = job->WaitStep();
  return status;
}

// Trains TEST_STEPS steps whatever becomes of the daemon, says which are committed, and in the end the smallest and the
// largest value of "a.weight", read with its gradients. Behind step 2 it awaits the file TEST_GO.
int TrainToTheEnd() {
  std::unique_ptr<Job> job;
  Status status = AttachFromEnvironment(&job);
  if (status.ok()) status = job->CommitParameters();
  const int64_t steps = atoi(Variable("TEST_STEPS").c_str());
  while (status.ok() && job->info().committed_step < steps) {
    const int64_t step = job->info().committed_step + 1;
    status = TrainStep(job.get(), step);
    if (status.code() == Code::kAborted) {
      status = job->Reattach();
    } else if (status.ok()) {
      printf("step %d\n", static_cast<int>(step));
      fflush(stdout);
      if (step == 2 && !AwaitGo()) return 3;
    }
  }
  if (!status.ok()) return Failed(status);
  Job::FullParams options;
  options.with_grads = true;
  status = job->UnshardParams(options, [&job] {
    const int32_t weight = job->FindParameter("a.weight");
    const auto* values = static_cast<const float*>(job->full_parameter_data(weight));
    const auto [least, most] = std::minmax_element(values, values + job->parameter_info(weight).numel);
    printf("%a to %a\n", static_cast<double>(*least), static_cast<double>(*most));
  });
  if (status.ok()) status = job->Finish();
  return status.ok() ? 0 : Failed(status);
}

volatile sig_atomic_t signalled = 0;

// Says "waiting", waits for what TEST_WAIT names, says with what code and text that ended. SIGINT ends it, as in any
// program with a handler that sets a flag. Attached programs first say "attached" and go on when the file TEST_GO is
// there.
int WaitUntilInterrupted() {
  signal(SIGINT, [](int) { signalled = 1; });
  Status status = Job::SetProcessInterrupt([](void*) -> int { return signalled; });
  const auto report = [&status] {
    printf("code %d %s\n", static_cast<int>(status.code()), status.message().c_str());
    return 0;
  };
  const std::string what = Variable("TEST_WAIT");
  const auto waiting = [] {
    printf("waiting\n");
    fflush(stdout);
  };
  std::unique_ptr<Job> job;
  if (what == "attach") {
    waiting();
    status = AttachFromEnvironment(&job);
    return report();
  }
  if (status = AttachFromEnvironment(&job); !status.ok()) {
    return Failed(status);
  }
  if (what == "step" || what == "unshard") {
    const shardd_hyperparameters sgd = Sgd(0.5);
    if (!(status = job->CommitParameters()).ok() || !(status = job->Step({sgd})).ok()) {
      return Failed(status);
    }
  }
  printf("attached\n");
  fflush(stdout);
  if (!AwaitGo()) {
    return 3;
  }
  if (what == "reattach") {
    status = job->CommitParameters();  // until it knows that the daemon is gone
  }
  waiting();
  if (what == "commit") {
    status = job->CommitParameters();
  } else if (what == "step") {
    status = job->WaitStep();
  } else if (what == "unshard") {
    status = job->group(0).Unshard(SHARDD_FORWARD);
  } else if (what == "reattach") {
    status = job->Reattach();
  } else if (what == "describe_job") {
    char* json = nullptr;
    status = Status::Take(shardd_describe_job(job->c_job(), &json));
  } else if (what == "detach") {
    status = job->Finish();
  }
  return report();
}

// From here on this process maps no shared memory of that size: EPERM. False: it may not limit itself so.
bool ForbidSharedMaps(uint32_t size_bytes) {
  constexpr auto argument = [](size_t i) { return static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * i); };
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 5),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(1)),  // the length
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, size_bytes, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(3)),  // the flags
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// A step of one rank where the session's memory cannot be mapped; 77: it cannot be forbidden.
int TrainWithoutSharedWords() {
  const absl::StatusOr<ShardPlan> plan = PlanShards(SmallSpec("programs", 1));
  if (!plan.ok() ||
      !ForbidSharedMaps(static_cast<uint32_t>(MakeSessionLayout(*plan, /*slots_elsewhere=*/true).memory_bytes))) {
    perror("seccomp");
    return 77;
  }
  std::unique_ptr<Job> job;
  Status status = AttachFromEnvironment(&job);
  if (status.ok()) status = job->CommitParameters();
  if (status.ok()) status = job->Step({Sgd(0.5)});
  if (status.ok()) status = job->WaitStep();
  if (!status.ok()) return Failed(status);
  printf("trained %d step\n", static_cast<int>(job->info().committed_step));
  return job->Finish().ok() ? 0 : 1;
}

int RunProgram(const std::string& name) {
  if (name == "exit_attached") {
    return ExitAttached();
  }
  if (name == "exit_with_static_job") {
    return ExitWithStaticJob();
  }
  if (name == "stay") {
    return Stay();
  }
  if (name == "train_to_the_end") {
    return TrainToTheEnd();
  }
  if (name == "wait_until_interrupted") {
    return WaitUntilInterrupted();
  }
  if (name == "train_without_shared_words") {
    return TrainWithoutSharedWords();
  }
  fprintf(stderr, "no such program: %s\n", name.c_str());
  return 2;
}

}  // namespace
}  // namespace shardd::testing_client

int main(int argc, char** argv) {
  constexpr char kFlag[] = "--program=";
  if (argc > 1 && strncmp(argv[1], kFlag, sizeof(kFlag) - 1) == 0) {
    return shardd::testing_client::RunProgram(argv[1] + sizeof(kFlag) - 1);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
