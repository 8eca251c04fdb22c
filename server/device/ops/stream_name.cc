#include "absl/strings/string_view.h"
#include "server/device/device.h"

namespace shardd {

absl::string_view StreamName(StreamId stream) {
  switch (stream) {
    case StreamId::kUnshard:
      return "unshard";
    case StreamId::kPostBackward:
      return "post_backward";
    case StreamId::kOptimizer:
      return "optimizer";
  }
  return "unknown";
}

}  // namespace shardd
