#ifndef SHARDD_TESTS_E2E_RANKS_END_H_
#define SHARDD_TESTS_E2E_RANKS_END_H_

// What ranks end with.

#include <string>

#include "client/cpp/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/bits.h"
#include "tests/e2e/ranks/moments.h"
#include "tests/e2e/ranks/report.h"

namespace shardd::e2e {

// That its epoch was aborted, and whether a step went with it.
inline void NoteAbort(const Job& job, const Status& status, TrainerReport* report) {
  report->AddNote("aborted " + std::to_string(job.info().committed_step) + " " + status.message());
  if (job.info().lost_nothing == 0) report->AddNote("lost a step");
}
// Finishes `job`, behind the moment "end", where `status` is that all has been trained, and reports what came of it. As
// the test that started this process says: bits, steps, folder, rank.
inline void FinishAsTold(const Args& args, const Moments& moments, Job* job, Status status, TrainerReport* report) {
  if (status.ok()) {
    if (args.Int("bits") != 0) ReportBits(*job, report);
    moments.Reach("end", args.Int("steps"));
    status = job->Finish();
  }
  report->ended_ms = NowMs();
  WriteReport(args.Text("folder"), args.Int("rank"), status, *report);
}

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_END_H_
