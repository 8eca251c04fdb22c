// Jobs that span several nodes: the links to the other daemons, and the collective over them.

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/collective/nodes/links/peer_gather.h"
#include "server/collective/nodes/node_collective.h"
#include "server/daemon/core.h"
#include "server/multinode/same_job.h"
#include "server/peer/late_links.h"
#include "server/storage/job_slab.h"
#ifndef SHARDD_NO_GPUS
#include "server/collective/nccl/nccl_library.h"
#include "server/collective/nodes/nccl/nccl_gather.h"
#endif

namespace shardd {
absl::Status Core::CheckNode(absl::string_view what, const ShardPlan& plan, int node) const {
  const int nodes = plan.nodes();
  if (node < 0 || node >= nodes) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": no such node (got ", node, ", want ",
                                                   nodes == 1 ? "0" : absl::StrCat("0 to ", nodes - 1), " with ",
                                                   plan.config.nodes().addresses_size(), " addresses in nodes)"));
  }
  if (nodes == 1) {
    return absl::OkStatus();
  }
  if (options_.join_nodes == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": it spans ", nodes,
                     " nodes and this daemon has no address for others (got no "
                     "--peer_listen, want one); start the daemons of all nodes with --peer_listen=host:port"));
  }
  const std::string& address = plan.config.nodes().addresses(node);
  if (address != options_.peer_address) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": node ", node, " is another daemon (got address ",
                                                      address, " in nodes, want ", options_.peer_address,
                                                      ", which is this one's --peer_address)"));
  }
  return absl::OkStatus();
}

absl::Status Core::AddNodes(int node, std::string link_key, bool late, JobCore::Init* init) {
  const ShardPlan& plan = *init->plan;
  auto nodes = std::make_unique<NodeParts>();
  nodes->node = node;
  nodes->link_key = link_key;
  nodes->worker = &node_values_;
  std::string serialized = init->spec.SerializeAsString();
  const bool on_gpus = devices_.front()->memory() != nullptr;
  PeerJoin join;
  join.data_path = "links";
#ifndef SHARDD_NO_GPUS
  if (on_gpus) join.data_path = NcclLibrary::Settings();
#endif
  const auto own = std::make_shared<OwnJob>(init->spec, serialized, init->plan, join.data_path, on_gpus);
  nodes->events =
      std::make_shared<NodeEvents>(&loop_, [this, id = init->id, own](const v1::PeerHello& hello, bool has_parameters) {
        return own->CheckSame(hello, has_parameters,
                              [this, id, node = hello.node()](std::shared_ptr<const Extension> missed) {
                                WidenJob(id, node, std::move(missed));
                              });
      });
  join.job = init->spec.name();
  join.uid = init->owner.uid;
  join.link_key = std::move(link_key);
  join.node = node;
  join.addresses.assign(plan.config.nodes().addresses().begin(), plan.config.nodes().addresses().end());
  join.spec = std::move(serialized);
  join.plan_digest = plan.digest;
  if (late) {  // the job whose place it takes has its links until it is freed
    if (join.spec.size() > static_cast<size_t>(kMaxPeerSpecBytes)) {  // it would be told so when that job is gone
      return absl::InvalidArgumentError(
          absl::StrCat("open job \"", join.job, "\": its description is too large for other nodes (got ",
                       join.spec.size(), " bytes, want at most ", kMaxPeerSpecBytes, ")"));
    }
    nodes->links = std::make_unique<LateLinks>(
        node, plan.nodes(), [this, join, events = nodes->events.get()] { return options_.join_nodes(join, events); },
        [events = nodes->events.get(), nodes = plan.nodes(), node](const absl::Status& why) {
          for (int other = 0; other < nodes; ++other) {
            if (other != node) events->OnDown(other, absl::FailedPreconditionError(why.message()));
          }
        });
  } else {
    SHARDD_ASSIGN_OR_RETURN(nodes->links, options_.join_nodes(join, nodes->events.get()));
  }
  const auto refused = [&](const absl::Status& why) {
    nodes->events->SetExchange(nullptr);
    return absl::Status(why.code(), absl::StrCat("open job \"", init->spec.name(), "\": ", why.message()));
  };
  const JobSlab* const source = plan.config.pass_copies() ? init->memory->parameters() : init->memory->shards();
  std::shared_ptr<NodeExchange> exchange;
  if (!on_gpus) {
    absl::StatusOr<std::unique_ptr<PeerExchange>> made = PeerExchange::Make(
        nodes->links.get(), plan.world_size * plan.node_slot_bytes / static_cast<int64_t>(sizeof(float)), kNodeSlots,
        plan.node_piece_bytes / static_cast<int64_t>(sizeof(float)), plan.cut_over_nodes ? NodesOfRow(plan) : 0);
    if (!made.ok()) return refused(made.status());
    exchange = *std::move(made);
    if (plan.cut_over_nodes) {
      nodes->gather = std::make_unique<PeerGather>(init->plan, nodes->links.get(), source->At(0));
    }
#ifndef SHARDD_NO_GPUS
  } else {
    const std::vector<char*> staging = init->memory->GatherStagingByRank(plan);  // none: nothing is cut over nodes
    NcclExchangeOptions by_ranks;
    by_ranks.node = node;
    by_ranks.nodes = plan.nodes();
    by_ranks.row_nodes = plan.cut_over_nodes ? NodesOfRow(plan) : 0;
    by_ranks.devices = init->devices.by_rank;
    by_ranks.addresses = join.addresses;
    for (char* const of_rank : staging) by_ranks.greetings.push_back(NcclGather::GreetingOf(plan, of_rank));
    by_ranks.send = [links = nodes->links.get()](int to, v1::PeerMessage message) {
      links->Send(to, std::move(message));
    };
    absl::StatusOr<std::unique_ptr<NcclExchange>> made =
        options_.node_exchanges(init->spec.name(), std::move(by_ranks));
    if (!made.ok()) return refused(made.status());
    const std::shared_ptr<NcclExchange> by_nccl = *std::move(made);
    exchange = by_nccl;
    if (plan.cut_over_nodes) {
      NcclGather::Options gather;
      gather.plan = init->plan;
      gather.node = node;
      gather.links = nodes->links.get();
      gather.exchange = by_nccl;
      gather.devices = init->devices.by_rank;
      gather.source = source->At(0);
      gather.staging = staging;
      nodes->gather = std::make_unique<NcclGather>(std::move(gather));
    }
#endif
  }
  nodes->events->SetExchange(exchange.get(), nodes->gather.get());
  auto collective = std::make_unique<NodeCollective>(init->devices.by_rank, std::move(exchange),
                                                     init->memory->StagingByRank(plan), plan.node_slot_bytes);
  nodes->collective = collective.get();
  init->devices.collective = std::move(collective);
  init->nodes = std::move(nodes);
  return absl::OkStatus();
}

}  // namespace shardd
