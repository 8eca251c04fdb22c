#ifndef SHARDD_TESTS_SERVER_METRICS_FULL_METRICS_H_
#define SHARDD_TESTS_SERVER_METRICS_FULL_METRICS_H_

#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// An answer of GetMetrics with something in every field, of one job.
inline v1::GetMetricsResponse FullMetrics() {
  v1::GetMetricsResponse metrics;
  DurationHistogram histogram;
  histogram.Add(absl::Milliseconds(10));
  histogram.Add(absl::Milliseconds(20));
  histogram.Add(absl::Seconds(3));
  v1::DaemonMetrics& daemon = *metrics.mutable_daemon();
  daemon.set_version("0.1.0");
  daemon.set_start_time_unix_ms(1'000);
  Describe(histogram, daemon.mutable_loop_lag());
  daemon.set_free_memory_bytes(1 << 30);
  daemon.set_open_files(20);
  daemon.set_max_open_files(1024);
  daemon.set_certificate_expires_unix_ms(2'000'000);
  daemon.add_devices()->set_device("cuda:0");
  v1::Stream& stream = *daemon.add_streams();
  stream.set_device("cuda:0");
  stream.set_name("optimizer");
  stream.set_busy_us(1'500'000);
  daemon.add_gpus()->set_device("cuda:0");
  v1::UserQuota& quota = *daemon.add_quotas();
  quota.set_uid(1000);
  quota.set_max_bytes(1 << 30);
  v1::JobMetrics& job = *metrics.add_jobs();
  job.set_name("gpt");
  job.set_uid(1000);
  job.set_world_size(2);
  job.set_state(v1::JOB_STATE_IDLE);
  job.set_collective("local");
  v1::Purpose& purpose = *job.mutable_memory()->add_purposes();
  purpose.set_purpose("shards");
  v1::Node& node = *job.add_nodes();
  node.set_address("b:4711");
  node.set_state("up");
  job.add_ranks()->set_last_heard_ns(250'000'000);
  job.add_ranks()->set_last_heard_ns(-1);
  job.mutable_time()->set_committed_ns(10'000'000'000);
  job.mutable_time()->set_dropped_ns(1'500'000'000);
  job.mutable_time()->set_taken_back_ns(2'000'000'000);
  v1::StepMetrics& steps = *job.mutable_steps();
  for (v1::Durations* durations :
       {steps.mutable_duration(), steps.mutable_forward(), steps.mutable_backward(), steps.mutable_optimizer(),
        steps.mutable_waiting(), steps.mutable_reduction(), steps.mutable_commit(), job.mutable_reductions()}) {
    Describe(histogram, durations);
  }
  v1::RankWait& wait = *job.add_waits();
  wait.set_awaited(1);
  wait.set_wait_ns(2'000'000'000);
  return metrics;
}

// The job has so many ranks, each of which has waited for every other one, on 32 nodes, with memory for all purposes.
inline void MakeLarge(int ranks, v1::JobMetrics* job) {
  job->set_world_size(ranks);
  job->clear_ranks();
  job->clear_waits();
  for (int rank = 0; rank < ranks; ++rank) job->add_ranks()->set_last_heard_ns(1);
  const bool pairs = ranks <= 12;
  for (int rank = pairs ? 0 : -1; rank < (pairs ? ranks : 0); ++rank) {
    for (int awaited = pairs ? 0 : -1; awaited < std::min(ranks, 64); ++awaited) {
      if (pairs && rank == awaited) continue;
      v1::RankWait& wait = *job->add_waits();
      wait.set_rank(rank);
      wait.set_awaited(awaited);
    }
  }
  for (int node = 0; node < 32; ++node) job->add_nodes()->set_address("node-" + std::to_string(node));
  for (int purpose = 0; purpose < 12; ++purpose)
    job->mutable_memory()->add_purposes()->set_purpose(std::to_string(purpose));
}

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_METRICS_FULL_METRICS_H_
