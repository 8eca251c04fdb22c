#ifndef SHARDD_TESTS_CLIENT_CLIENT_FIXTURE_H_
#define SHARDD_TESTS_CLIENT_CLIENT_FIXTURE_H_

// Verbs for tests of the C ABI against a real daemon process.

#include <gtest/gtest.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/c/shardd.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/model.pb.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/process.h"

namespace shardd::testing_client {

using testing::Child;
using testing::kLimit;
using testing::ReadWholeFile;
using testing::TempDir;

// Polls until `condition` holds; false after kLimit.
inline bool Eventually(const std::function<bool()>& condition, absl::Duration limit = testing::kLimit) {
  return testing::PollUntil(condition, limit);
}

// This test binary itself as a process, running the program of that name (programs.cc).
Child SpawnProgram(const std::string& program, const std::vector<std::string>& environment,
                   const std::string& log = "");

// A daemon of its own for one test, with its socket and state in a folder of its own.
class Daemon {
 public:
  explicit Daemon(int devices = 2) : devices_(devices) { Restart(); }
  void Restart();
  std::string address() const { return daemon_->address(); }
  std::string socket_path() const { return daemon_->socket_path(); }
  std::string log() const { return daemon_->log(); }
  Child& process() { return daemon_->process(); }

 private:
  TempDir dir_;
  const int devices_;
  std::unique_ptr<testing::DaemonProcess> daemon_;
};

// What the daemon says of itself and of a rank, over its jobs service.
v1::Daemon GetDaemon(const std::string& address);
void CloseJob(const std::string& address, const std::string& job);
std::string LastCommand(const std::string& address, const std::string& job, int rank);

// Two fully sharded blocks of one weight and one bias under a root with a head and, if asked, a frozen parameter; SGD.
v1::JobSpec SmallSpec(const std::string& name, int world_size);
std::string ToJson(const v1::JobSpec& spec);

// A C status that must be freed; prints itself.
class Result {
 public:
  Result(shardd_status* status);  // NOLINT: takes ownership, reads like the call it wraps
  int code() const { return code_; }
  const std::string& message() const { return message_; }
  bool ok() const { return code_ == 0; }

 private:
  int code_;
  std::string message_;
};
std::ostream& operator<<(std::ostream& out, const Result& result);

// google.rpc.Code
inline constexpr int kInvalidArgument = 3;
inline constexpr int kDeadlineExceeded = 4;
inline constexpr int kNotFound = 5;
inline constexpr int kAlreadyExists = 6;
inline constexpr int kPermissionDenied = 7;
inline constexpr int kFailedPrecondition = 9;
inline constexpr int kAborted = 10;
inline constexpr int kUnimplemented = 12;
inline constexpr int kUnavailable = 14;

#define EXPECT_C_OK(expression)                                       \
  do {                                                                \
    const ::shardd::testing_client::Result result_ = (expression);    \
    EXPECT_TRUE(result_.ok()) << #expression << " gives " << result_; \
  } while (false)
#define ASSERT_C_OK(expression)                                       \
  do {                                                                \
    const ::shardd::testing_client::Result result_ = (expression);    \
    ASSERT_TRUE(result_.ok()) << #expression << " gives " << result_; \
  } while (false)
// `text`: a part of the message.
#define EXPECT_C_ERROR(expression, want_code, text)                                                    \
  do {                                                                                                 \
    const ::shardd::testing_client::Result result_ = (expression);                                     \
    EXPECT_EQ(result_.code(), want_code) << #expression << " gives " << result_;                       \
    EXPECT_NE(result_.message().find(text), std::string::npos) << #expression << " gives " << result_; \
  } while (false)

// One attached rank. Detaches with its end.
class Rank {
 public:
  Rank() = default;
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  Result Attach(const std::string& address, const v1::JobSpec& spec, int rank, absl::Duration timeout = kLimit,
                bool replace = false);
  shardd_job* job() const { return job_; }
  shardd_job* Release();
  int Group(const char* name) const { return shardd_find_group(job_, name); }
  int Param(const char* fqn) const { return shardd_find_param(job_, fqn); }
  shardd_job_info Info() const;
  shardd_param_info ParamInfo(int param) const;
  shardd_group_info GroupInfo(int group) const;
  shardd_counters Counters() const;
  // Every parameter filled with `value` (fp32 only) by this rank, then commit.
  void WriteAll(float value);
  // Unshard, wait; expects success.
  void Unshard(int group, shardd_phase phase);
  float First(int param) const;

 private:
  shardd_job* job_ = nullptr;
};

// Runs `body(rank)` on a thread for each rank, waits for all.
void ForEachRank(int world_size, const std::function<void(int)>& body);

// All ranks of a job and its daemon.
struct World {
  explicit World(const v1::JobSpec& spec);
  // On a thread for each rank.
  void Each(const std::function<void(int, Rank&)>& body);
  Daemon daemon;
  std::vector<Rank> ranks;
};
// All parameters begin as 1.
struct FilledWorld : World {
  explicit FilledWorld(const v1::JobSpec& spec);
};

float* StoredShard(Rank& rank, int param);
shardd_shard_range RangeOf(const Rank& rank, int param);
// Makes all gradients of the group's parameters `value` in the rank's slot, which it has waited for.
void FillGradients(Rank& rank, int group, float value);

// lr alone.
shardd_hyperparameters Sgd(double lr);

}  // namespace shardd::testing_client

#endif  // SHARDD_TESTS_CLIENT_CLIENT_FIXTURE_H_
