#ifndef SHARDD_SERVER_JOB_GRADIENTS_SETTLE_H_
#define SHARDD_SERVER_JOB_GRADIENTS_SETTLE_H_

// What devices do about gradients that some ranks have and others have dropped, or written by themselves. Pure.

#include "common/plan/plan.h"
#include "server/job/gradients/gradient_presence.h"
#include "server/job/work/optimizer_devices.h"

namespace shardd {

// By rank's device: brings copy 0 of gradient shards, which alone is read, to what their owners have: several where
// strategies replicate. It is that of the first copy one of whose owners has something, and zero where none has.
// `gradients`: the slab. Each flat parameter is walked once, whatever was said of it, because this runs on the loop.
DeviceOps SettleOps(const ShardPlan& plan, char* gradients, const GradientPresence::Uneven& has);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_SETTLE_H_
