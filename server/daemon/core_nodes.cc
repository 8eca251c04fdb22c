// Jobs that span several nodes: the links to the other daemons, and the collective over them.

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/plan/extend.h"
#include "common/status/status_macros.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/collective/nodes/links/peer_gather.h"
#include "server/collective/nodes/node_collective.h"
#include "server/daemon/core.h"
#include "server/peer/late_links.h"
#include "server/storage/job_slab.h"
#ifndef SHARDD_NO_GPUS
#include "server/collective/nccl/nccl_library.h"
#include "server/collective/nodes/nccl/nccl_gather.h"
#endif

namespace shardd {
namespace {

constexpr size_t kMoreOfSpecBytes = size_t{64} << 10;

constexpr size_t kMostShownBytes = 100;  // of another node's text

// Whether `wide` describes the job of `narrow` with more to train, and no other difference.
absl::StatusOr<Extension> ExtensionTo(const v1::JobSpec& wide, const ShardPlan& planned, const v1::JobSpec& narrow,
                                      const ShardPlan& plan) {
  SHARDD_ASSIGN_OR_RETURN(Extension extension, Extend(wide, narrow, plan));
  if (extension.what.empty() || extension.plan.digest != planned.digest) {
    return absl::FailedPreconditionError("it does not train more");
  }
  return extension;
}

// This node's part of a job, as other nodes are compared with it.
struct OwnJob {
  v1::JobSpec spec;
  std::string serialized;
  std::shared_ptr<const ShardPlan> plan;
  std::string data_path;
};

// Whether another node's spec describes the job, and its gradients move as here. A node that has missed an extension
// describes what was trained before. Where that is this node, UNAVAILABLE, and `missed` is called with what it missed;
// where it is the other one, OK: it learns so from this node's answer.
absl::Status CheckSameJob(const OwnJob& own, bool has_parameters, const v1::PeerHello& hello,
                          const std::function<void(Extension)>& missed) {
  const auto& [spec, serialized, plan_of_own, data_path] = own;
  const ShardPlan& plan = *plan_of_own;
  if (!hello.data_path().empty() && hello.data_path() != data_path) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradients of node ", hello.node(), " move otherwise (got ",
                     absl::CHexEscape(hello.data_path().substr(0, kMostShownBytes)), ", want ", data_path,
                     "); ranks train on GPUs on all nodes or on none, and their daemons' NCCL_ settings are alike"));
  }
  if (hello.spec() == serialized) {
    return absl::OkStatus();
  }
  if (hello.spec().size() > serialized.size() + kMoreOfSpecBytes) {  // planning it would take long, and say the same
    return absl::FailedPreconditionError(
        absl::StrCat("node ", hello.node(), " describes another job under this name: a larger one (got ",
                     hello.spec().size(), " bytes of description, want ", serialized.size(), ")"));
  }
  v1::JobSpec other;
  if (!other.ParseFromString(hello.spec())) {
    return absl::FailedPreconditionError(
        "its description of the job cannot be read; install the same version on all nodes");
  }
  SHARDD_ASSIGN_OR_RETURN(const ShardPlan others, PlanShards(other));
  if (others.digest == plan.digest) {
    return absl::OkStatus();
  }
  if (hello.has_parameters() && hello.takes_extensions()) {
    if (absl::StatusOr<Extension> wider = ExtensionTo(other, others, spec, plan); wider.ok()) {
      const std::string what = wider->what;
      missed(*std::move(wider));
      return absl::UnavailableError(
          absl::StrCat("node ", hello.node(), " trains ", what, " by now, as this node does soon; it is tried again"));
    }
  }
  if (has_parameters && hello.takes_extensions() && ExtensionTo(spec, plan, other, others).ok()) {
    return absl::OkStatus();
  }
  const std::string difference = FirstDifference(other, spec);
  return absl::FailedPreconditionError(absl::StrCat("node ", hello.node(), " describes another job under this name: ",
                                                    difference.empty() ? "plans differ" : difference));
}

}  // namespace

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
  if (on_gpus && !plan.config.trainers_never_write()) {
    return absl::UnimplementedError(
        absl::StrCat("open job \"", init->spec.name(),
                     "\": optimizers that step in the trainers are not served on GPUs of several nodes (got "
                     "OPTIMIZER_KIND_TRAINER, want an optimizer of the daemon's)"));
  }
  PeerJoin join;
  join.data_path = "links";
#ifndef SHARDD_NO_GPUS
  if (on_gpus) join.data_path = NcclLibrary::Settings();
#endif
  nodes->events = std::make_shared<NodeEvents>(
      &loop_, [this, id = init->id, own = OwnJob{init->spec, serialized, init->plan, join.data_path}](
                  const v1::PeerHello& hello, bool has_parameters) {
        return CheckSameJob(own, has_parameters, hello, [this, id, node = hello.node()](Extension extension) {
          WidenJob(id, node, std::move(extension));
        });
      });
  join.job = init->spec.name();
  join.uid = init->owner.uid;
  join.link_key = std::move(link_key);
  join.node = node;
  join.addresses.assign(plan.config.nodes().addresses().begin(), plan.config.nodes().addresses().end());
  join.spec = std::move(serialized);
  if (late) {  // the job whose place it takes has its links until it is freed
    nodes->links = std::make_unique<LateLinks>(
        node, plan.nodes(), [this, join, events = nodes->events.get()] { return options_.join_nodes(join, events); },
        [events = nodes->events.get(), nodes = plan.nodes(), node](const absl::Status& why) {
          for (int other = 0; other < nodes; ++other) {
            if (other != node) events->OnDown(other, absl::FailedPreconditionError(why.message()));
          }
        });
  } else {
    SHARDD_ASSIGN_OR_RETURN(nodes->links, options_.join_nodes(std::move(join), nodes->events.get()));
  }
  std::shared_ptr<NodeExchange> exchange;
  if (!on_gpus) {
    exchange = std::make_shared<PeerExchange>(
        nodes->links.get(), plan.world_size * plan.node_slot_bytes / static_cast<int64_t>(sizeof(float)), kNodeSlots,
        plan.node_piece_bytes / static_cast<int64_t>(sizeof(float)));
    if (plan.cut_over_nodes) {
      const JobSlab* const source = plan.config.pass_copies() ? init->memory->parameters() : init->memory->shards();
      nodes->gather = std::make_unique<PeerGather>(init->plan, nodes->links.get(), source->At(0));
    }
#ifndef SHARDD_NO_GPUS
  } else {
    const std::vector<char*> staging = init->memory->GatherStagingByRank(plan);  // none: nothing is cut over nodes
    std::vector<char*> greetings;
    for (char* const of_rank : staging) greetings.push_back(NcclGather::GreetingOf(plan, of_rank));
    absl::StatusOr<std::unique_ptr<NcclExchange>> made = options_.node_exchanges(
        init->spec.name(), node, plan.nodes(), init->devices.by_rank, std::move(greetings),
        [links = nodes->links.get()](int to, v1::PeerMessage message) { links->Send(to, std::move(message)); });
    if (!made.ok()) {
      nodes->events->SetExchange(nullptr);
      return absl::Status(made.status().code(),
                          absl::StrCat("open job \"", init->spec.name(), "\": ", made.status().message()));
    }
    const std::shared_ptr<NcclExchange> by_nccl = *std::move(made);
    exchange = by_nccl;
    if (plan.cut_over_nodes) {
      NcclGather::Options gather;
      gather.plan = init->plan;
      gather.links = nodes->links.get();
      gather.exchange = by_nccl;
      gather.devices = init->devices.by_rank;
      gather.shards = init->memory->shards()->At(0);
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
