#ifndef SHARDD_TESTS_E2E_RANKS_REPORT_H_
#define SHARDD_TESTS_E2E_RANKS_REPORT_H_

// What a rank found. It writes it to "rank.R" in the folder of its job when it ends; the test reads it there.

#include <cstdint>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/model.h"

namespace shardd::e2e {

struct TrainerReport {
  int code = -1;  // shardd::Code of what ended it; -1: it never got so far
  std::string message;
  int64_t ended_ms = 0;                               // NowMs when it was told so
  int64_t waited_ms = 0;                              // for the longest ReattachTimed
  std::vector<double> stepped_ms;                     // NowMs behind each step, of one rank in order
  std::vector<double> losses;                         // by step, as far as this process trained
  std::vector<double> norms;                          // by step
  std::vector<double> clips;                          // by step
  Values values;                                      // at the end
  std::vector<std::string> bits;                      // ReportBits, with the argument "bits"
  std::vector<std::string> notes;                     // "aborted STEP MS MESSAGE", "state ..."
  std::string Note(const std::string& prefix) const;  // the first note that begins so; "" without
  void AddNote(const std::string& text);
};

// Appears in one piece. Code and message of `report` come from `status`.
void WriteReport(const std::string& folder, int rank, const Status& status, const TrainerReport& report);
TrainerReport ReadReport(const std::string& folder, int rank);

// CLOCK_MONOTONIC in ms, the same for all processes.
int64_t NowMs();

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_REPORT_H_
