#ifndef SHARDD_CLIENT_TORCH_STREAM_WAIT_H_
#define SHARDD_CLIENT_TORCH_STREAM_WAIT_H_

#include <c10/core/Stream.h>

#include <chrono>
#include <functional>

#include "client/cpp/shardd.h"

namespace shardd {

// Blocks until `stream` has run all that it has; the host looks now and then, because a synchronisation has no end.
// DEADLINE_EXCEEDED after `limit`: a kernel hangs, or is still at work; the stream is left as it is. CANCELLED:
// `interrupted` (may be null; asked now and then) has said so. Throws what torch does where the device is lost.
Status WaitForStream(const c10::Stream& stream, std::chrono::milliseconds limit, int rank,
                     const std::function<bool()>& interrupted);

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_STREAM_WAIT_H_
