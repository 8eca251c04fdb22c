#ifndef SHARDD_CLIENT_CTL_TRACE_CALL_TEXT_H_
#define SHARDD_CLIENT_CTL_TRACE_CALL_TEXT_H_

#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// What a traced call is called in the picture; the same category has the same colour.
struct CallText {
  const char* name;
  const char* category;
};

// Also of a call that this program does not know.
CallText TextOf(v1::TraceCall call);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_TRACE_CALL_TEXT_H_
