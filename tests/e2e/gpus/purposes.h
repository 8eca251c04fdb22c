#ifndef SHARDD_TESTS_E2E_GPUS_PURPOSES_H_
#define SHARDD_TESTS_E2E_GPUS_PURPOSES_H_

#include <map>
#include <string>

#include "gtest/gtest.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd::e2e {

// What the memory of a job is for, as operators see it.
inline std::map<std::string, v1::Purpose> PurposesOf(v1::JobsService::Stub& jobs, const std::string& name = "job") {
  grpc::ClientContext context;
  v1::JobRef ref;
  ref.set_job(name);
  v1::Memory memory;
  EXPECT_TRUE(jobs.GetMemory(&context, ref, &memory).ok());
  std::map<std::string, v1::Purpose> purposes;
  for (const v1::Purpose& purpose : memory.purposes()) purposes[purpose.purpose()] = purpose;
  return purposes;
}

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_GPUS_PURPOSES_H_
