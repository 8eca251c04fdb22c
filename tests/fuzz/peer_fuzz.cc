// What the daemon of another node says over a link: bytes that may be a piece of gradients or parameters, and messages
// to node 0's state machine, many in a row and from several nodes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "common/plan/plan.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/impl/grpc_library.h"
#include "server/multinode/node_coordinator.h"
#include "server/peer/peer_wire.h"
#include "tests/fuzz/require.h"

namespace shardd {
namespace {

constexpr int kNodes = 3;

std::shared_ptr<const ShardPlan> MakePlan(v1::Strategy strategy) {
  v1::JobSpec spec;
  spec.set_name("fuzz");
  spec.set_world_size(1);
  v1::ModuleTree& tree = *spec.mutable_tree();
  for (const char* name : {"", "a", "b"}) {
    v1::Module& module = *tree.add_modules();
    module.set_name(name);
    module.set_parent(tree.modules_size() == 1 ? -1 : 0);
    module.set_class_name("Layer");
    v1::Parameter& parameter = *module.add_parameters();
    parameter.set_name("weight");
    parameter.add_shape(8);
    parameter.set_dtype(v1::DTYPE_FLOAT32);
    parameter.set_requires_grad(true);
    parameter.set_storage_id(static_cast<uint64_t>(tree.modules_size()));
  }
  spec.mutable_policy()->mutable_always();
  v1::JobConfig& config = *spec.mutable_config();
  config.set_strategy(strategy);
  config.set_trainers_never_write(true);
  config.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  for (int node = 0; node < kNodes; ++node) {
    config.mutable_nodes()->add_addresses("host" + std::to_string(node) + ":7000");
  }
  absl::StatusOr<ShardPlan> plan = PlanShards(spec, 0);
  if (!plan.ok()) {
    std::fprintf(stderr, "%s\n", plan.status().ToString().c_str());
    std::abort();
  }
  return std::make_shared<const ShardPlan>(*std::move(plan));
}

void CheckPiece(const uint8_t* data, size_t size) {
  v1::PeerData header;
  absl::string_view elements;
  const grpc::Slice slice(data, size);
  if (const absl::Status status = DecodeData(slice, &header, &elements); status.ok()) {
    REQUIRE(elements.size() <= size);
    REQUIRE(elements.empty() || (reinterpret_cast<const uint8_t*>(elements.data()) >= slice.begin() &&
                                 reinterpret_cast<const uint8_t*>(elements.data()) + elements.size() <= slice.end()));
  } else {
    REQUIRE(absl::IsInvalidArgument(status) && !status.message().empty());
  }
}

// Each message: a byte for node and generation, a byte for its length, its bytes.
void CheckMessages(const std::shared_ptr<const ShardPlan>& plan, const uint8_t* data, size_t size) {
  int64_t sent = 0;
  int64_t taken = 0;
  bool decides = false;
  NodeCoordinator coordinator(
      plan, /*generation=*/1,
      [&](int node, const v1::PeerMessage&) { sent += node >= 0 && node < kNodes ? 1 : 1 << 20; },
      [&] { decides = true; }, [](int) {});
  for (int node = 0; node < kNodes; ++node) coordinator.OnUp(node);
  for (size_t at = 0; at + 2 <= size;) {
    const uint8_t how = data[at];
    const size_t bytes = std::min<size_t>(data[at + 1], size - at - 2);
    v1::PeerMessage message;
    const bool parsed = message.ParseFromArray(data + at + 2, static_cast<int>(bytes));
    at += 2 + bytes;
    ++taken;
    const int node = how % kNodes;
    if (how >= 0xf0) {
      coordinator.OnDown(node, absl::UnavailableError("the link broke"));
      coordinator.OnUp(node);
    }
    if (!parsed) continue;
    if (how % 8 != 0) message.set_generation(coordinator.generation());  // mostly
    const uint64_t generation = coordinator.generation();
    decides = false;
    coordinator.OnMessage(node, message);
    if (decides && generation == coordinator.generation()) {
      v1::PeerMessage::Decided decided;
      decided.set_step(coordinator.reduced(0).step());
      decided.set_present(coordinator.reduced(0).present());
      coordinator.Decide(decided);
    }
    REQUIRE(coordinator.generation() >= generation);
    (void)coordinator.Waiting();
    (void)coordinator.Lacking();
    (void)coordinator.Unheld();
  }
  REQUIRE(sent <= (taken + 1) * 16 * kNodes);  // answers in proportion to what was said
}

}  // namespace
}  // namespace shardd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const google::protobuf::LogSilencer quiet;
  // grpc::Slice calls through a pointer that this sets: nothing else that this program links of gRPC does.
  static const grpc::internal::GrpcLibraryInitializer grpc_core;
  static const auto replicas = shardd::MakePlan(shardd::v1::STRATEGY_HYBRID_SHARD);
  static const auto cut = shardd::MakePlan(shardd::v1::STRATEGY_FULL_SHARD);
  shardd::CheckPiece(data, size);
  shardd::CheckMessages(replicas, data, size);
  shardd::CheckMessages(cut, data, size);
  return 0;
}
