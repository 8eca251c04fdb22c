#ifndef SHARDD_SERVER_JOB_JOB_IDENTITY_H_
#define SHARDD_SERVER_JOB_JOB_IDENTITY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Who a job is, and what it trains: constant from its beginning.
struct JobIdentity {
  uint64_t id = 0;
  Tenant owner;
  v1::JobSpec spec;
  std::shared_ptr<const ShardPlan> plan;
  absl::Time created;
  std::optional<v1::LostJob> lost;  // what one of this name had before, which was not kept
  v1::KeptFormats kept_formats;     // where a custodian keeps it
  std::string link_key = {};        // of several nodes: what derives from its secret, for links (JobSecret::LinkKey)

  const std::string& name() const { return spec.name(); }
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_IDENTITY_H_
