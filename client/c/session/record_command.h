#ifndef SHARDD_CLIENT_C_SESSION_RECORD_COMMAND_H_
#define SHARDD_CLIENT_C_SESSION_RECORD_COMMAND_H_

#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "common/shm/session_view.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// What a record of the ring says as a message for the stream, with the masks, payload and staged elements that it names
// in the session's memory. CommandRecord::done has no message: without shared words no stream of a GPU signals.
// REQUIRES: the record is of this library, which writes what fits.
v1::Command CommandOfRecord(const CommandRecord& record, const ShardPlan& plan, const SessionLayout& layout,
                            const SessionMemoryView& view);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_RECORD_COMMAND_H_
