#ifndef SHARDD_SERVER_DAEMON_GPU_STATUS_H_
#define SHARDD_SERVER_DAEMON_GPU_STATUS_H_

#include <vector>

#include "google/protobuf/repeated_field.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

struct GpuFacts;

// The GPUs as operators see them, appended to `out`. Pure.
void DescribeGpus(const std::vector<GpuFacts>& gpus, google::protobuf::RepeatedPtrField<v1::Gpu>* out);

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_GPU_STATUS_H_
