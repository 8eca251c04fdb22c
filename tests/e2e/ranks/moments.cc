#include "tests/e2e/ranks/moments.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {
namespace {

constexpr int64_t kPauseLimitMs = 120'000;

void SleepMs(int64_t ms) {
  const timespec time = {ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&time, nullptr);
}

// SIGKILL to this process.
void KillIn(int delay_us) {
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer = nullptr;
  timer_create(CLOCK_MONOTONIC, &event, &timer);
  const itimerspec when = {{0, 0}, {delay_us / 1'000'000, delay_us % 1'000'000 * 1000}};
  timer_settime(timer, 0, &when, nullptr);
}

}  // namespace

Moments::Moments(const Args& args) : args_(args) {
  if (const int delay_us = args_.Int("kill_after_us"); delay_us > 0) KillIn(delay_us);
}

bool Moments::At(const std::string& what, const std::string& name, int64_t step) const {
  std::istringstream moments(args_.Text(what));
  for (std::string text; std::getline(moments, text, ',');) {
    const size_t at = text.find('@');
    if (text.substr(0, at) == name && (at == std::string::npos || std::atoll(text.c_str() + at + 1) == step)) {
      return true;
    }
  }
  return false;
}

std::string Moments::File(const std::string& prefix, const std::string& name) const {
  return args_.Text("folder") + "/" + prefix + "." + name + "." + args_.Text("rank");
}

void Moments::Reach(const std::string& name, int64_t step) const {
  if (const int late_us = args_.Int("kill_late_us"); late_us > 0 && At("kill", name, step)) {
    KillIn(late_us);
  } else if (At("kill", name, step)) {
    std::ofstream(args_.Text("folder") + "/killed." + args_.Text("rank")) << NowMs();
    kill(getpid(), SIGKILL);
  }
  if (At("mark", name, step)) {
    std::ofstream(File("at", name)) << NowMs();
  }
  if (At("pause", name, step)) {
    std::ofstream(File("at", name)) << NowMs();
    const int64_t end = NowMs() + kPauseLimitMs;
    while (access(File("go", name).c_str(), F_OK) != 0 && NowMs() < end) {
      SleepMs(1);
    }
  }
}

}  // namespace shardd::e2e
