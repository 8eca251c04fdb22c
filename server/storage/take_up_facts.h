#ifndef SHARDD_SERVER_STORAGE_TAKE_UP_FACTS_H_
#define SHARDD_SERVER_STORAGE_TAKE_UP_FACTS_H_

// What a job's log says to the daemon that takes the job up (take_up_log.h), as plain types.

#include <cstdint>

namespace shardd {

// Whoever had the rank's last session, and may write what it has mapped behind this daemon's end, until it asks to
// attach again.
struct FormerProcess {
  int32_t pid = 0;  // 0: it is not known which, as in another PID namespace
  uint32_t uid = 0;
  uint64_t start_ticks = 0;
};

// Which memory a daemon that takes up the job goes on with.
enum class WhatCounts : uint32_t {
  kShards = 0,
  kSnapshot = 1,            // trainers may store into the shards
  kSnapshotBeingTaken = 2,  // of the shards, into which nobody stores meanwhile: the copy can be made again
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_TAKE_UP_FACTS_H_
