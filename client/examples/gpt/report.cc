#include "client/examples/gpt/report.h"

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

namespace gpt {
namespace {

// A field of /proc/self/status in MiB.
double StatusMib(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) {
      return std::strtod(line.c_str() + line.find(':') + 1, nullptr) / 1024;
    }
  }
  return 0;
}

void Append(std::FILE* file, const nlohmann::json& line) {
  if (file != nullptr) {
    const std::string text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    std::fwrite(text.data(), 1, text.size(), file);
    std::fflush(file);
  }
}

}  // namespace

double Now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

Report::Report(const std::string& path, int64_t rank, int64_t log_every)
    : path_(path), rank_(rank), log_every_(log_every) {
  if (!path.empty()) {
    file_ = std::fopen(path.c_str(), "ae");
  }
}

Report::~Report() {
  if (file_ != nullptr) {
    std::fclose(file_);
  }
}

void Report::Step(int64_t rank, int64_t step, double loss, double grad_norm, double tokens_per_s) {
  const double own_mib = StatusMib("RssAnon");
  const double shared_mib = StatusMib("RssShmem");
  Append(file_, {{"step", step},
                 {"rank", rank},
                 {"loss", loss},
                 {"grad_norm", grad_norm},
                 {"tokens_per_s", tokens_per_s},
                 {"own_mib", own_mib},
                 {"shared_mib", shared_mib},
                 {"cpu_s", static_cast<double>(std::clock()) / CLOCKS_PER_SEC},
                 {"time", Now()}});
  if (log_every_ > 0 && rank == 0 && (step % log_every_ == 0 || step == 1)) {
    std::printf("step %5lld  loss %.4f  %6.0f tokens/s  trainer memory %.0f MiB own, %.0f MiB shared\n",
                static_cast<long long>(step), loss, tokens_per_s, own_mib, shared_mib);
    std::fflush(stdout);
  }
}

void Report::Event(const char* what, int64_t committed_step, const std::string& text) {
  Append(file_,
         {{"event", what}, {"rank", rank_}, {"committed_step", committed_step}, {"text", text}, {"time", Now()}});
  if (log_every_ > 0) {
    std::printf("rank %lld: %s at committed step %lld%s%s\n", static_cast<long long>(rank_), what,
                static_cast<long long>(committed_step), text.empty() ? "" : ": ", text.c_str());
    std::fflush(stdout);
  }
}

}  // namespace gpt
