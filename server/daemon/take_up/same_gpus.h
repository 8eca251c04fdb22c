#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_SAME_GPUS_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_SAME_GPUS_H_

#include "absl/status/status.h"
#include "server/device/slab_place.h"
#include "shardd/v1/custody.pb.h"

namespace shardd {

// FAILED_PRECONDITION: the devices are not those that the job was on.
absl::Status CheckSameGpus(const v1::CustodyJob& job, const SlabPlace& place);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_SAME_GPUS_H_
