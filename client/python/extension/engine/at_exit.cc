#include "client/python/extension/engine/at_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

struct LeftJob {
  std::string name;
  std::vector<std::string> notes;
  std::unique_ptr<Job> job;
  std::unique_ptr<OpenStep> step;  // null: there is none
};

struct LeftJobs {
  pid_t process;
  std::vector<LeftJob> jobs;
};

// Guarded by the GIL, and by nothing in exit(). Never freed: destructors come in any order.
LeftJobs* left_jobs = nullptr;

Status CloseLeftStep(LeftJob& left) {
  if (left.step == nullptr) {
    return Status();
  }
  Status status = left.step->Close([&left](const shardd_step_options& options) { return left.job->StepWith(options); });
  return status.ok() ? left.job->WaitStep() : status;
}

void EndLeftJob(LeftJob& left, bool finished) {
  const Undisturbed undisturbed;  // there is no interpreter to ask any more
  if (!finished) {
    left.job.reset();
    return;
  }
  if (const Status status = CloseLeftStep(left); !status.ok()) {
    std::fprintf(stderr, "shardd: job \"%s\": its last step was not committed: %s\n", left.name.c_str(),
                 status.message().c_str());
  } else {
    for (const std::string& note : left.notes) {
      (void)unlink(note.c_str());
    }
  }
  (void)left.job->Finish();  // it was over already, or nobody came
}

// At once, each on a thread: ranks of one job may be in this process, and wait for each other.
void EndLeftJobs(int status, void* /*context*/) {
  if (left_jobs == nullptr || left_jobs->process != getpid()) {
    return;  // the parent's, in a forked child
  }
  constexpr int kTold = 0xff;  // of the status, to whoever waits for the process
  const bool finished = (status & kTold) == 0;
  std::vector<std::thread> threads;
  for (LeftJob& left : left_jobs->jobs) {
    try {
      threads.emplace_back([&left, finished] { EndLeftJob(left, finished); });
    } catch (const std::system_error&) {  // no more threads
      EndLeftJob(left, finished);
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  left_jobs->jobs.clear();
}

// Registered as late as can be, so that it is called first, with all that the library has still there.
bool IsToldTheStatus() {
#ifdef __GLIBC__
  static const bool told = on_exit(&EndLeftJobs, nullptr) == 0;
  return told;
#else
  return false;
#endif
}

}  // namespace

void LeaveToExit(Engine& engine, std::string name, std::vector<std::string> notes) {
  if (!engine.attached().open()) {
    return;
  }
  LeftJob left{std::move(name), std::move(notes), nullptr, std::move(engine.open_step_)};
  std::exception_ptr failure;
  if (engine.alive()) {
    try {
      engine.Release();
    } catch (...) {
      failure = std::current_exception();  // the others are told all the same
    }
  }
  left.job = engine.attached().Take();
  if (IsToldTheStatus()) {
    if (left_jobs == nullptr || left_jobs->process != getpid()) {
      left_jobs = new LeftJobs{getpid(), {}};  // those of a parent are its own
    }
    left_jobs->jobs.push_back(std::move(left));
  } else {
    const NoGil no_gil;
    left.job.reset();
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

}  // namespace shardd::python
