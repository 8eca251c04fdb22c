#ifndef SHARDD_TESTS_E2E_CLUSTER_H_
#define SHARDD_TESTS_E2E_CLUSTER_H_

// The verbs of tests with a real daemon and real ranks: start a daemon, start ranks (processes of this very binary, see
// main.cc), kill, wait, look through the jobs service.

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "shardd/v1/jobs.grpc.pb.h"
#include "shardd/v1/model.pb.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/trainer.h"
#include "tests/e2e/reference.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"

namespace shardd::e2e {

// Where the daemon's bytes and descriptors are: what must not grow.
struct Footprint {
  int descriptors = 0;
  int shared_maps = 0;  // memfd and state files in its address space
  // No more of either. A look at a daemon may find a connection that is just ending, so what a test compares with may
  // be one too many.
  friend bool operator<=(const Footprint& a, const Footprint& b) {
    return a.descriptors <= b.descriptors && a.shared_maps <= b.shared_maps;
  }
};
std::ostream& operator<<(std::ostream& out, const Footprint& footprint);

class Cluster : public ::testing::Test {
 protected:
  ~Cluster() override;

  // Starts a daemon and waits until it answers. As DaemonProcess.
  void StartDaemon(const std::vector<std::string>& flags = {}, const std::string& devices = "cpu:2",
                   const std::vector<std::string>& environment = {}, const std::string& program = "");
  // "NAME=value" for every rank that is started from now on.
  void RanksFind(std::vector<std::string> environment) { rank_environment_ = std::move(environment); }
  // They are run by this program, with their arguments behind it; else by this one.
  void RanksAreRunBy(std::vector<std::string> program) { ranks_program_ = std::move(program); }
  // Another one beside it would need another socket: one at a time.
  int StopDaemon();                                          // SIGTERM; its exit code
  int WaitForDaemon() { return daemon_->process().Wait(); }  // its exit code
  bool DaemonAlive();
  pid_t daemon_pid() const { return daemon_->pid(); }
  std::string DaemonLog() const { return daemon_->log(); }  // its path
  Footprint DaemonFootprint() const;
  // What the daemon and a custodian have beside it, before any job.
  struct Empty {
    Footprint daemon;
    int custodian_descriptors = 0;
    std::string targets;  // of the daemon's descriptors
  };
  // Of a daemon that has answered: once nothing has come for a moment, because its threads may still be starting.
  Empty EmptyWith(const testing::Child& custodian) const;
  // All jobs have come to their end: this daemon and the custodian have what they had then at most, and no other
  // process that has the test's folder in its arguments is there.
  void ExpectNothingLeft(const Empty& empty, const testing::Child& custodian) const;
  std::string socket() const { return daemon_->socket_path(); }
  std::string File(const std::string& name) const { return folder_.File(name); }

  // One rank as a process. Its report is read by Report.
  testing::Child StartRank(int rank, const Args& args);
  // All ranks at once; waits for them; their reports by rank. `per_rank` adds to `args`; `at_end` is called when all
  // have trained and are still attached.
  std::vector<TrainerReport> RunRanks(const Args& args, const std::map<int, Args>& per_rank = {},
                                      const std::function<void()>& at_end = nullptr);
  // Kills every process that a rank has left behind.
  void EndRanks();
  TrainerReport Report(const Args& args, int rank) const { return ReadReport(Folder(args), rank); }
  // Results of a job lie here; one folder per job name.
  std::string Folder(const Args& args) const;
  // Until a rank has come to its "pause" (or has ended); then lets it go.
  void AwaitPause(const Args& args, const std::string& moment, int rank);
  // When a rank that has ended came to its "mark" or "pause" (NowMs); 0: never.
  int64_t TimeOf(const Args& args, const std::string& moment, int rank) const;
  void LetGo(const Args& args, const std::string& moment, int rank);

  // The jobs service. Empty messages where the call fails.
  v1::Job Job(const std::string& name = "job");
  std::vector<v1::Rank> Ranks(const std::string& name = "job");
  std::vector<v1::Group> Groups(const std::string& name = "job");
  std::vector<v1::Event> Events(const std::string& name = "job");
  v1::Daemon DaemonStatus();
  bool HasEvent(const std::string& name, const std::string& kind, const std::string& text);
  v1::JobsService::Stub& jobs() { return *jobs_; }

 private:
  testing::TempDir folder_;
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<v1::JobsService::Stub> jobs_;
  std::vector<std::string> rank_environment_;
  std::vector<std::string> ranks_program_ = {"/proc/self/exe"};
  std::set<pid_t> groups_;  // process groups of ranks, ended with the test
};

// proto3 JSON of the job that `args` describe.
std::string SpecJson(const Args& args);

// Losses and values are those of the reference, within `tolerance` of the largest element of each tensor. `as_read`: as
// Reference.
void ExpectParity(const Args& args, const std::vector<TrainerReport>& reports, double tolerance = 1e-5,
                  const Reference::AsRead& as_read = nullptr);
// All bits.
void ExpectSame(const std::vector<TrainerReport>& got, const std::vector<TrainerReport>& want);
void ExpectAllOk(const std::vector<TrainerReport>& reports);
// A rank's call was FAILED_PRECONDITION with this text; another one may have heard of its end first.
::testing::AssertionResult OneIsRefused(const std::vector<TrainerReport>& reports, const std::string& text);

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_CLUSTER_H_
