#ifndef SHARDD_TESTS_FAULTS_RAW_CLIENT_H_
#define SHARDD_TESTS_FAULTS_RAW_CLIENT_H_

// A client that keeps no rule: it speaks to the trainer service itself and writes what it likes into the memory that a
// session gives it.

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/fd_channel.h"
#include "common/shm/session_view.h"
#include "common/shm/slab.h"
#include "common/status/grpc_status.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/jobs.grpc.pb.h"
#include "shardd/v1/trainer.grpc.pb.h"
#include "tests/e2e/ranks/args.h"

namespace shardd::faults {

// A plain connection, made on the calling thread. Invalid with errno where the daemon or the file system refuses.
UniqueFd ConnectTo(const std::string& socket_path);

// The spec that a well-behaved trainer with these arguments sends.
v1::JobSpec SpecOf(const e2e::Args& args);

// One session stream.
class RawStream {
 public:
  explicit RawStream(v1::TrainerService::Stub& stub);
  ~RawStream();
  void Hello(uint64_t session_id, const std::string& token);
  bool Write(const v1::SessionRequest& request) { return stream_->Write(request); }
  // The next event; an empty one when the stream has ended.
  v1::SessionEvent Read();
  // Reads to the end: what the stream ended with, or, where an `aborted` came first, its code and text.
  absl::Status End();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> stream_;
  bool finished_ = false;
};

// REQUIRES of all below: the calls before have succeeded.
class RawClient {
 public:
  explicit RawClient(const std::string& socket_path);
  // On a connection of ConnectTo: the caller is whoever made it. (gRPC itself connects on threads of its own.)
  RawClient(const std::string& socket_path, UniqueFd connected);

  v1::TrainerService::Stub& stub() { return *stub_; }
  v1::JobsService::Stub& jobs() { return *jobs_; }
  absl::StatusOr<v1::OpenJobResponse> Open(const v1::OpenJobRequest& request);
  absl::StatusOr<v1::OpenJobResponse> Open(const v1::JobSpec& spec);
  absl::StatusOr<v1::AttachRankResponse> Attach(uint64_t job_id, int rank, bool replace = false);
  absl::Status Close(uint64_t job_id);
  // From now on every unary call gives this job secret; empty: none.
  void Gives(const std::string& secret) { secret_ = secret; }
  // One call of the jobs service; its status.
  template <typename Request, typename Response>
  absl::Status Ask(grpc::Status (v1::JobsService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                   const Request& request, Response* response) {
    grpc::ClientContext context;
    Prepare(context);
    return FromGrpcStatus((jobs_.get()->*method)(&context, request, response));
  }
  // How a trace of the job ends.
  absl::Status Trace(const v1::TraceJobRequest& request);
  // Any method, "/shardd.v1.TrainerService/OpenJob", with any bytes.
  absl::Status Call(const std::string& method, const std::string& bytes);

  // Open, attach, hello, map: a session of `rank` that can be misused.
  absl::Status Enter(const v1::JobSpec& spec, int rank);
  const v1::AttachRankResponse& session() const { return session_; }
  RawStream& stream() { return *stream_; }
  const ShardPlan& plan() const { return plan_; }
  const SessionLayout& layout() const { return layout_; }
  SessionMemoryView& memory() { return memory_; }
  char* payload() { return memory_.At<char>(layout_.payload_offset_bytes); }

  // What the daemon tells by its page.
  const DaemonPage& daemon_page() const { return *daemon_slab_.At<const DaemonPage>(0); }

  // Writes a record as the next one (its sequence too, unless `sequence` is given) and announces it.
  void Send(CommandRecord record, int64_t sequence = -1);
  // Stores the word that says how many records there are.
  void Announce(uint64_t value);
  // The daemon has taken all records; until it has.
  bool HasConsumed() const;
  bool Consumed();

 private:
  RawClient(const std::string& socket_path, const std::shared_ptr<grpc::Channel>& channel);
  void Prepare(grpc::ClientContext& context) const;  // deadline and secret

  const std::string socket_path_;
  std::string secret_;
  std::unique_ptr<v1::TrainerService::Stub> stub_;
  std::unique_ptr<v1::JobsService::Stub> jobs_;
  std::unique_ptr<grpc::GenericStub> generic_;
  v1::AttachRankResponse session_;
  ShardPlan plan_;
  SessionLayout layout_;
  UniqueFd doorbell_;
  MappedSlab session_slab_;
  MappedSlab daemon_slab_;
  SessionMemoryView memory_;
  uint64_t submitted_ = 0;
  std::unique_ptr<RawStream> stream_;  // last: ends before the memory goes
};

}  // namespace shardd::faults

#endif  // SHARDD_TESTS_FAULTS_RAW_CLIENT_H_
