#ifndef SHARDD_SERVER_DEVICE_OPS_REST_OF_UPDATE_H_
#define SHARDD_SERVER_DEVICE_OPS_REST_OF_UPDATE_H_

// What updates change in place, and what is left to do of one whose process was killed.

#include <cstdint>
#include <vector>

#include "common/tensor/update_log.h"
#include "server/device/device_op.h"

namespace shardd {

// Null: the operation is no update, or says nothing to a log.
const Logged* LoggedOf(const DeviceOp& op);
Logged* MutableLoggedOf(DeviceOp* op);  // of any update; null: the operation is none

// What an update changes in place of `numel` elements from `first` on, in the order of a log.
struct UpdatedArrays {
  UpdateLog::Array arrays[UpdateLog::kArrays];
};
UpdatedArrays UpdatedArraysOf(const AdamWOp& op, int64_t first, int64_t numel);
UpdatedArrays UpdatedArraysOf(const SgdOp& op, int64_t first, int64_t numel);
UpdatedArrays UpdatedArraysOf(const RuleOp& op, int64_t first, int64_t numel);
// Of a matrix, elements of the log: those of the momentum buffer, then those of the parameter (common/tensor/muon.h).
UpdatedArrays UpdatedArraysOf(const MuonOp& op, int64_t first, int64_t numel);
// Of a parameter of Adafactor: those of state 0, of state 1, and then those of the parameter
// (common/tensor/adafactor.h).
UpdatedArrays UpdatedArraysOf(const AdafactorOp& op, int64_t first, int64_t numel);
// What an update of all of its elements, or a copy, writes, but for a cast copy; empty: something else.
std::vector<UpdateLog::Array> WrittenBy(const DeviceOp& op);
// Where old values of array `i` lie in a GPU's place for them.
inline char* OldValues(const Logged::Place& place, int i) {
  return place.old + i * place.numel * UpdateLog::kMaxElementBytes;
}

// Of operations of one rank on a GPU: when `put_back` has run and the log hears NotTorn, `ops` complete the update.
// Both may be begun anew where they are killed.
struct RestOfUpdate {
  std::vector<DeviceOp> put_back;
  std::vector<DeviceOp> ops;
};
// `ops`: all of the rank's in the update of `step`, in their order, each update with the same log and place. Operations
// that are no updates are run again as a whole.
RestOfUpdate RestOf(const std::vector<DeviceOp>& ops, int64_t step);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_OPS_REST_OF_UPDATE_H_
