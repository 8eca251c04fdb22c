#ifndef SHARDD_SERVER_JOB_ADVANCE_H_
#define SHARDD_SERVER_JOB_ADVANCE_H_

// The one table that decides what a job does next. A command or an event records what happened; JobCore::Advance then
// does whatever the rows of the table allow, from the first row on, until none allows anything. Who waits for whom
// follows from the same rows. README.md shows the table, and a test compares the two.

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "server/job/wait.h"

namespace shardd {

class JobCore;

// What rows ask about the job as a whole. Advance collects these facts in one walk over the ranks, so that a row whose
// time has not come costs two comparisons.
enum Fact : uint32_t {
  kPooled = 1u << 0,             // ranks unshard into slots of a pool
  kOverNodes = 1u << 1,          // the job spans several nodes
  kTrainersWrite = 1u << 2,      // trainers store into the shards
  kPassCopies = 1u << 3,         // of these: passes read copies
  kCommitting = 1u << 4,         // a version is being made
  kApplied = 1u << 5,            // it is a decided step, which is made and not shown yet
  kDeciding = 1u << 6,           // the norm of a step is being measured
  kReducing = 1u << 7,           // gradients are being added
  kSomeHandIn = 1u << 8,         // some rank was let in to write since the last version
  kEnding = 1u << 9,             // the epoch is to end, as soon as it may
  kAllStepped = 1u << 10,        // every rank has sent Step
  kAllEntering = 1u << 11,       // every rank has sent EnterPass
  kAllFullParams = 1u << 12,     // every rank has sent EnterFullParams, or need not
  kAllCommitted = 1u << 13,      // every rank has sent CommitParameters
  kSomeInside = 1u << 14,        // some rank is inside EnterFullParams
  kSomeWantToHandIn = 1u << 15,  // some rank waits for HandIn
  kSomeBlocked = 1u << 16,       // some rank sleeps until its gradient slot is released
  kSomeLate = 1u << 17,          // some rank enters a pass without an optimizer step
  kSomeLeft = 1u << 18,          // some rank has said good-bye and is kept for its gradients or its step
  kOwesWord = 1u << 19,          // ranks have closed backwards that nobody was told are reduced
  kAllExtend = 1u << 20,         // every rank has sent ExtendJob
  kNobodyAttached = 1u << 21,    // no rank has a session
  kUnlikeCalls = 1u << 22,       // ranks wait for each other in calls that differ (unlike_calls.h)
};
constexpr int kFacts = 23;

// What a row does. May return nothing where it cannot fail.
class Act {
 public:
  template <typename F>
  constexpr Act(F act) {  // NOLINT(google-explicit-constructor): rows are written as functions
    if constexpr (std::is_void_v<std::invoke_result_t<F, JobCore&>>) {
      sure_ = act;
    } else {
      may_fail_ = act;
    }
  }
  absl::Status operator()(JobCore& job) const {
    return sure_ == nullptr ? may_fail_(job) : (sure_(job), absl::OkStatus());
  }

 private:
  void (*sure_)(JobCore&) = nullptr;
  absl::Status (*may_fail_)(JobCore&) = nullptr;
};

// A row of the table. A row is open when all facts of `needs` hold, none of `unless` does, and `may` says yes; `may`
// changes nothing. `act` must leave its row closed, or return an error, which ends the epoch.
struct Transition {
  const char* name;
  uint32_t needs;
  uint32_t unless;
  bool (*may)(const JobCore&);
  Act act;
  // Whom `rank` waits for until this row can open; null: no rank waits for it, or not for a rank.
  Wait (*waits_for)(const JobCore&, int rank);
  const char* waits;  // likewise in words; empty: nobody waits
  const char* why;    // what the row is for
  // Why the row stands above those below it that may be open at the same time; empty: there are none.
  const char* order;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_ADVANCE_H_
