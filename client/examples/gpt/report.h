#ifndef SHARDD_CLIENT_EXAMPLES_GPT_REPORT_H_
#define SHARDD_CLIENT_EXAMPLES_GPT_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <string>

namespace gpt {

// Seconds since the epoch.
double Now();

// What a trainer says about itself: JSON lines in a file, a line now and then on stdout. One write per line, so ranks
// may share a file.
class Report {
 public:
  // `path` empty: no file. `log_every` 0: no lines on stdout.
  Report(const std::string& path, int64_t rank, int64_t log_every);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;
  // False when the file cannot be written.
  bool ok() const { return file_ != nullptr || path_.empty(); }

  // Step number `step` (from 1) has been committed; `loss` is that of `rank`. tokens_per_s: of the whole job.
  void Step(int64_t rank, int64_t step, double loss, double grad_norm, double tokens_per_s);
  // attached, aborted, reattached, finished.
  void Event(const char* what, int64_t committed_step, const std::string& text = "");

 private:
  const std::string path_;
  const int64_t rank_;
  const int64_t log_every_;
  std::FILE* file_ = nullptr;
};

}  // namespace gpt

#endif  // SHARDD_CLIENT_EXAMPLES_GPT_REPORT_H_
