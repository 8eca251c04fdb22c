#include "client/ctl/views.h"

#include <string>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace shardd::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

const View kView = {.color = false, .now = absl::FromUnixMillis(1'000'000), .handles = false};

TEST(ViewsTest, JobsShowAttachedRanksStepsAndSizes) {
  const auto jobs = Parse<v1::ListJobsResponse>(R"pb(
    jobs {
      name: "gpt"
      uid: 1000
      world_size: 4
      state: JOB_STATE_FORWARD_BACKWARD
      epoch: 2
      committed_step: 41
      attached_ranks: 4
      groups: 8
      parameters_numel: 10816512
      slab_bytes: 173067264
      created_unix_ms: 955000
      counters { departures: 3 aborts: 1 }
    }
    jobs { name: "b" world_size: 2 state: JOB_STATE_WAITING attached_ranks: 1 created_unix_ms: 999999 }
  )pb");
  EXPECT_EQ(
      Show(jobs, kView),
      "JOB  STATE             RANKS  STEP  EPOCH  GROUPS         PARAMETERS      SLABS  ABORTS  DEPARTURES   UID  "
      "   AGE\n"
      "gpt  forward_backward    4/4    41      2       8  10816512 (10.8 M)  165.0 MiB       1           3  1000  "
      "45.0 s\n"
      "b    waiting             1/2     0      0       0                  0    0.0 MiB       0           0     0  "
      "1.0 ms\n");
  EXPECT_EQ(Show(v1::ListJobsResponse(), kView), "no jobs\n");
}

TEST(ViewsTest, OnlyWhatIsUnusualIsColoured) {
  const auto jobs = Parse<v1::ListJobsResponse>(R"pb(
    jobs {
      name: "a"
      world_size: 2
      attached_ranks: 2
      state: JOB_STATE_IDLE
      counters { aborts: 0 }
    }
    jobs {
      name: "b"
      world_size: 2
      attached_ranks: 1
      state: JOB_STATE_WAITING
      counters { aborts: 7 }
    }
  )pb");
  View view = kView;
  view.color = true;
  EXPECT_THAT(Show(jobs, view), AllOf(HasSubstr("\x1b[33m1/2\x1b[0m"), HasSubstr("\x1b[31m7\x1b[0m"),
                                      Not(HasSubstr("\x1b[33m2/2")), Not(HasSubstr("\x1b[31m0"))));
}

TEST(ViewsTest, RanksShowWhomTheyWaitFor) {
  const auto ranks = Parse<v1::ListRanksResponse>(R"pb(
    ranks {
      rank: 0
      state: RANK_STATE_BACKWARD
      device: "cpu:0"
      pid: 4711
      commands: 120
      last_command: "SubmitGradients layers.3"
      last_command_age_ms: 12
      waiting_for: "rank 1: SubmitGradients layers.3"
      handles { group: "layers.3" storage_state: "UNSHARDED(1)" training_state: "BACKWARD_PRE" }
    }
    ranks { rank: 1 state: RANK_STATE_ABSENT }
  )pb");
  EXPECT_EQ(Show(ranks, kView),
            "RANK  STATE     DEVICE   PID  COMMANDS  DEPARTURES      AGE  LAST COMMAND              WAITING FOR\n"
            "   0  backward  cpu:0   4711       120           0  12.0 ms  SubmitGradients layers.3  rank 1: "
            "SubmitGradients layers.3\n"
            "   1  absent    -          -         0           0        -  -                         -\n");
  View view = kView;
  view.handles = true;
  EXPECT_THAT(Show(ranks, view), HasSubstr("RANK  GROUP     STORAGE       TRAINING\n"
                                           "   0  layers.3  UNSHARDED(1)  BACKWARD_PRE\n"));
}

TEST(ViewsTest, GroupsAddUpTheirFlatParameters) {
  const auto groups = Parse<v1::ListGroupsResponse>(R"pb(
    groups {
      index: 0
      name: "(root)"
      parameters: 2
      numel: 100
      padded_numel: 128
      gradient_slot: 1
      flat_params { dtype: DTYPE_FLOAT32 requires_grad: true shard_numel: 32 }
      flat_params { dtype: DTYPE_BFLOAT16 requires_grad: false shard_numel: 32 }
    }
    groups {
      index: 1
      name: "layers.0"
      depth: 1
      reshard_after_forward: true
      gradient_slot: -1
      flat_params { dtype: DTYPE_FLOAT32 shard_numel: 7 unsharded_dtype: DTYPE_FLOAT16 }
      also_unshards: "(root)"
    }
  )pb");
  EXPECT_EQ(
      Show(groups, kView),
      "INDEX  GROUP       PARAMETERS  NUMEL  PADDED  SHARD  DTYPE               TRAINED  RESHARD         GRADIENT "
      "SLOT  ALSO UNSHARDS\n"
      "    0  (root)               2    100     128     64  bfloat16 float32    partly   after backward              "
      "1  -\n"
      "    1    layers.0           0      0       0      7  float32 as float16  no       after forward               "
      "-  (root)\n");
}

TEST(ViewsTest, GroupsThatAreGatheredInFloat8AreMarked) {
  const auto groups = Parse<v1::ListGroupsResponse>(R"pb(
    groups {
      name: "blocks"
      mixed_precision { float8_gathers: true }
      flat_params { dtype: DTYPE_FLOAT32 unsharded_dtype: DTYPE_BFLOAT16 }
      flat_params { dtype: DTYPE_INT64 unsharded_dtype: DTYPE_INT64 }
    }
    groups {
      name: "head"
      flat_params { dtype: DTYPE_FLOAT32 unsharded_dtype: DTYPE_BFLOAT16 }
    }
  )pb");
  EXPECT_THAT(Show(groups, kView),
              AllOf(HasSubstr(" float32 as bfloat16 by float8 int64  "), HasSubstr(" float32 as bfloat16        ")));
}

TEST(ViewsTest, ParametersShowEachRanksElements) {
  const auto parameters = Parse<v1::ListParametersResponse>(R"pb(
    parameters {
      fqn: "wte.weight"
      aliases: "head.weight"
      shape: 65
      shape: 8
      dtype: DTYPE_FLOAT32
      requires_grad: true
      group: "(root)"
      offset_numel: 0
      shards { first: 0 numel: 264 }
      shards { first: 264 numel: 256 }
    }
    parameters { fqn: "scale" dtype: DTYPE_FLOAT32 group: "(root)" offset_numel: 520 }
  )pb");
  EXPECT_EQ(Show(parameters, kView),
            "PARAMETER   SHAPE    DTYPE    TRAINED  GROUP   OFFSET  OPTIMIZER GROUP  NUMEL PER RANK  TIED TO\n"
            "wte.weight  [65, 8]  float32  yes      (root)       0                0  264 256         head.weight\n"
            "scale       []       float32  no       (root)     520                0                  -\n");
}

TEST(ViewsTest, MemoryEndsWithItsTotal) {
  const auto memory = Parse<v1::Memory>(R"pb(
    job: "gpt"
    planned_bytes: 3145728
    allocated_bytes: 2097152
    purposes { purpose: "shards" planned_bytes: 1048576 allocated_bytes: 1048576 backing: "sealed memfd" }
    purposes { purpose: "unsharded pool" planned_bytes: 2097152 allocated_bytes: 1048576 backing: "sealed memfd" }
  )pb");
  EXPECT_EQ(Show(memory, kView),
            "PURPOSE         PLANNED  ALLOCATED  BACKING\n"
            "shards          1.0 MiB    1.0 MiB  sealed memfd\n"
            "unsharded pool  2.0 MiB    1.0 MiB  sealed memfd\n"
            "total           3.0 MiB    2.0 MiB\n");
}

TEST(ViewsTest, MemoryOverSeveralGpusSaysWhatEachHas) {
  const auto memory = Parse<v1::Memory>(R"pb(
    purposes {
      purpose: "shards"
      planned_bytes: 5242880
      allocated_bytes: 6291456
      backing: "cuda"
      devices { device: "cuda:0" allocated_bytes: 4194304 }
      devices { device: "cuda:1" allocated_bytes: 2097152 }
    }
    purposes {
      purpose: "gradients"
      planned_bytes: 1048576
      allocated_bytes: 2097152
      backing: "cuda:0"
      devices { device: "cuda:0" allocated_bytes: 2097152 }
    }
  )pb");
  const std::string text = Show(memory, kView);
  EXPECT_THAT(text, HasSubstr("shards     5.0 MiB    6.0 MiB  cuda:0 4.0 MiB, cuda:1 2.0 MiB\n"));
  EXPECT_THAT(text, HasSubstr("gradients  1.0 MiB    2.0 MiB  cuda:0\n"));
}

TEST(ViewsTest, StreamsShowWhatIsQueued) {
  const auto streams = Parse<v1::ListStreamsResponse>(R"pb(
    streams { device: "cpu:0" name: "post_backward" submitted: 12 done: 9 busy_us: 4500 current: "reduce layers.3" }
    streams { device: "cpu:0" name: "unshard" }
  )pb");
  EXPECT_EQ(Show(streams, kView),
            "DEVICE  STREAM         SUBMITTED  DONE  QUEUED    BUSY  NOW\n"
            "cpu:0   post_backward         12     9       3  4.5 ms  reduce layers.3\n"
            "cpu:0   unshard                0     0       0    0 us  -\n");
}

TEST(ViewsTest, EventsOfTheJobHaveNoRank) {
  const auto events = Parse<v1::ListEventsResponse>(R"pb(
    events { unix_us: 1000 job: "gpt" epoch: 2 step: 41 rank: 1 kind: "abort" text: "rank 1 died" }
    events { unix_us: 2000 job: "gpt" epoch: 3 step: 41 rank: -1 kind: "epoch" text: "epoch 3" }
  )pb");
  const std::string text = Show(events, kView);
  EXPECT_THAT(text, HasSubstr("gpt      2    41     1  abort  rank 1 died\n"));
  EXPECT_THAT(text, HasSubstr("gpt      3    41     -  epoch  epoch 3\n"));
  EXPECT_EQ(Show(v1::ListEventsResponse(), kView), "no events\n");
}

TEST(ViewsTest, DaemonSaysHowOldItIsAndWhatItHolds) {
  const auto daemon = Parse<v1::Daemon>(R"pb(
    version: "0.1.0"
    protocol_version: 1
    pid: 99
    start_time_unix_ms: 400000
    devices: "cpu:0"
    devices: "cpu:1"
    jobs: 2
    slab_bytes: 1048576
    huge_pages: "none: shmem_enabled is never"
    isolation: "own uid"
    handover: "possible"
  )pb");
  EXPECT_EQ(Show(daemon, "/run/shardd/shardd.sock", kView),
            "daemon      shardd 0.1.0, protocol 1\n"
            "address     /run/shardd/shardd.sock\n"
            "pid         99\n"
            "up          10 min 0 s\n"
            "devices     cpu:0 cpu:1\n"
            "jobs        2\n"
            "slabs       1.0 MiB\n"
            "huge pages  none: shmem_enabled is never\n"
            "isolation   own uid\n"
            "handover    possible\n"
            "embedded    no\n");
  v1::Daemon with_range = daemon;
  with_range.set_oldest_protocol_version(1);
  with_range.set_protocol_version(3);
  EXPECT_THAT(Show(with_range, "", kView), HasSubstr("shardd 0.1.0, protocol 1 to 3\n"));
}

TEST(ViewsTest, TheDaemonsViewShowsGpuSettingsAndWarnings) {
  const auto daemon = Parse<v1::Daemon>(R"pb(
    devices: "cuda:0"
    gpus {
      device: "cuda:0"
      description: "NVIDIA H200, 139 GiB"
      pci_bus_id: "0000:65:00.0"
      mps: "off"
      persistence_mode: "unknown: no NVML"
      compute_mode: "default"
    }
    warnings: "a trap; unset it"
  )pb");
  EXPECT_THAT(Show(daemon, "", kView),
              AllOf(HasSubstr("cuda:0      NVIDIA H200, 139 GiB, at 0000:65:00.0, MPS off, persistence mode unknown: "
                              "no NVML, compute mode default\njobs"),
                    HasSubstr("embedded    no\nwarning     a trap; unset it\n")));
}

TEST(ViewsTest, JobSaysItsDefaultsInWords) {
  const auto job = Parse<v1::Job>(R"pb(
    name: "gpt"
    job_id: 7
    uid: 1000
    world_size: 2
    attached_ranks: 2
    state: JOB_STATE_IDLE
    committed_step: 3
    config {
      layout: LAYOUT_DIM0
      mixed_precision { param_dtype: DTYPE_BFLOAT16 }
      optimizer { kind: OPTIMIZER_KIND_ADAMW }
    }
    counters { commits: 3 bytes_updated: 1048576 }
  )pb");
  EXPECT_THAT(Show(job, kView),
              AllOf(HasSubstr("gpt (id 7, uid 1000)\n"), HasSubstr("2 of 2 attached\n"), HasSubstr("full_shard\n"),
                    HasSubstr("dim0\n"), HasSubstr("bfloat16\n"), HasSubstr("as submitted\n"), HasSubstr("adamw\n"),
                    HasSubstr("world size\n"), HasSubstr("3, 1.0 MiB updated\n")));
}

TEST(ViewsTest, JobsOverNodesShowThemAndWhyOneIsDown) {
  const auto job = Parse<v1::Job>(R"pb(
    name: "gpt"
    world_size: 2
    attached_ranks: 1
    state: JOB_STATE_WAITING
    nodes { index: 0 address: "a:7100" state: "up" here: true }
    nodes { index: 1 address: "b:7100" state: "up" bytes_sent: 2097152 bytes_received: 3145728 }
    nodes { index: 2 address: "c:7100" state: "down: connection refused" }
  )pb");
  EXPECT_THAT(Show(job, kView), AllOf(HasSubstr("1 of 2 attached, on this node\n"), HasSubstr("3, 1 down\n"),
                                      HasSubstr("NODE  ADDRESS     SENT  RECEIVED  HERE  STATE\n"
                                                "   0  a:7100   0.0 MiB   0.0 MiB  yes   up\n"
                                                "   1  b:7100   2.0 MiB   3.0 MiB  no    up\n"
                                                "   2  c:7100   0.0 MiB   0.0 MiB  no    down: connection refused\n")));
  View view = kView;
  view.color = true;
  EXPECT_THAT(Show(job, view), AllOf(HasSubstr("\x1b[31mdown: connection refused"), HasSubstr("\x1b[31m3, 1 down")));
}

TEST(ViewsTest, ADaemonSaysWhereOtherNodesReachIt) {
  const auto daemon = Parse<v1::Daemon>(R"pb(peer_address: "10.0.0.1:7100")pb");
  EXPECT_THAT(Show(daemon, "", kView), HasSubstr("10.0.0.1:7100\n"));
  EXPECT_THAT(Show(v1::Daemon(), "", kView), Not(HasSubstr("other nodes")));
}

}  // namespace
}  // namespace shardd::ctl
