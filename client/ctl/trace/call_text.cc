#include "client/ctl/trace/call_text.h"

namespace shardd::ctl {

CallText TextOf(v1::TraceCall call) {
  switch (call) {
    case v1::TRACE_CALL_UNSHARD_FORWARD:
    case v1::TRACE_CALL_UNSHARD_BACKWARD:
      return {"unshard", "unshard"};
    case v1::TRACE_CALL_WAIT_UNSHARD:
      return {"wait unshard", "wait"};
    case v1::TRACE_CALL_RESHARD:
      return {"reshard", "reshard"};
    case v1::TRACE_CALL_WAIT_GRADIENT_SLOT:
      return {"wait gradient slot", "wait"};
    case v1::TRACE_CALL_SUBMIT_GRADIENTS:
      return {"submit gradients", "submit"};
    case v1::TRACE_CALL_BACKWARD_DONE:
      return {"backward done", "step"};
    case v1::TRACE_CALL_STEP:
      return {"step", "step"};
    case v1::TRACE_CALL_WAIT_STEP:
      return {"wait step", "wait"};
    case v1::TRACE_CALL_WAIT_GRADIENTS:
      return {"wait gradients", "wait"};
    case v1::TRACE_CALL_WRITE_PARAMETER:
      return {"write parameter", "parameters"};
    case v1::TRACE_CALL_WRITE_GRADIENT:
      return {"write gradient", "parameters"};
    case v1::TRACE_CALL_COMMIT_PARAMETERS:
      return {"commit parameters", "parameters"};
    case v1::TRACE_CALL_ENTER_FULL_PARAMS:
      return {"enter full parameters", "parameters"};
    case v1::TRACE_CALL_LEAVE_FULL_PARAMS:
      return {"leave full parameters", "parameters"};
    case v1::TRACE_CALL_ENTER_PASS:
      return {"enter pass", "step"};
    case v1::TRACE_CALL_LEAVE_PASS:
      return {"leave pass", "step"};
    case v1::TRACE_CALL_HAND_IN:
      return {"hand in", "step"};
    case v1::TRACE_CALL_ABANDON_BACKWARD:
      return {"abandon backward", "step"};
    case v1::TRACE_CALL_SET_GRADIENT_PRESENCE:
      return {"set gradient presence", "parameters"};
    default:
      return {"call", "call"};
  }
}

}  // namespace shardd::ctl
