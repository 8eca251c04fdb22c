#ifndef SHARDD_SERVER_JOB_COMMAND_INTAKE_H_
#define SHARDD_SERVER_JOB_COMMAND_INTAKE_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/session/rank_command.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

class Committed;
class JobControl;
class Session;
class Sessions;

// Takes the commands of a job's ranks out of their rings and streams and has them executed, one at a time, in turns
// that end: no client keeps the loop from its timers, from the job's other ranks or from other jobs. A command that
// returns an error ends the epoch, and its session executes nothing more.
//
// Owns whose ring is looked at first. Loop-confined.
class CommandIntake {
 public:
  // An error: the client must not do that. The epoch, or the session, may have ended when it returns OK.
  using Execute = std::function<absl::Status(Session*, RankCommand&&)>;
  // All outlive this.
  CommandIntake(const Sessions* sessions, const Committed* committed, JobControl* job, Execute execute)
      : sessions_(sessions), committed_(committed), job_(job), execute_(std::move(execute)) {}

  // Takes commands from all rings, no new one after `until`. `found`: the turn has done something already. Returns
  // whether it has in the end. Stops where the epoch ends.
  bool PollRings(absl::Time until, bool found);
  // Executes commands of the batch from number `first` on, at least one and no new one after `until`. Returns the
  // number of the one to go on with; behind the last where the batch is done or the session is.
  int ExecuteFromStream(Session* session, const v1::CommandBatch& batch, int first = 0,
                        absl::Time until = absl::InfiniteFuture());

 private:
  // Returns whether the session may go on: it and its epoch have not ended, and are not about to.
  bool Run(Session* session, absl::StatusOr<RankCommand> command);

  const Sessions* const sessions_;
  const Committed* const committed_;
  JobControl* const job_;
  const Execute execute_;
  int next_polled_ = 0;  // the rank whose ring is looked at first
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_COMMAND_INTAKE_H_
