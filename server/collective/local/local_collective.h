#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_

#include <vector>

#include "server/collective/collective.h"

namespace shardd {

// All ranks of the job on this node: each device reads every rank's slot for its own work segments once and writes the
// gradient shards once. devices[r] is rank r's (several ranks may share one); they outlive this object and all requests.
class LocalCollective final : public Collective {
 public:
  explicit LocalCollective(std::vector<Device*> devices);
  const char* name() const override { return "local"; }
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override;

 private:
  const std::vector<Device*> devices_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_
