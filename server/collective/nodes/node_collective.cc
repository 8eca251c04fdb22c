#include "server/collective/nodes/node_collective.h"

#include "absl/strings/str_cat.h"
#include "server/collective/nodes/node_sums.h"
#include "server/device/device.h"

namespace shardd {

NodeCollective::NodeCollective(std::vector<Device*> devices, std::shared_ptr<NodeExchange> exchange,
                               std::vector<char*> staging, int64_t slot_bytes)
    : exchange_(std::move(exchange)),
      sums_(std::make_shared<NodeSums>(std::move(devices), exchange_.get(), std::move(staging), slot_bytes)) {}

NodeCollective::~NodeCollective() { sums_->Stop(); }

std::string NodeCollective::Describe() const { return absl::StrCat("nodes: ", exchange_->Describe()); }

void NodeCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  sums_->Enter(std::move(request), std::move(done));
}

void NodeCollective::AllGather(AllGatherRequest request, Done done) {
  sums_->local().AllGather(std::move(request), std::move(done));
}

void NodeCollective::Begin(uint64_t generation) { sums_->Begin(generation); }

}  // namespace shardd
