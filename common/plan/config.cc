#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/plan/config_internal.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/placement_internal.h"
#include "common/plan/plan.h"
#include "common/status/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace shardd::plan_internal {
namespace {

constexpr int kMaxInflightUnshards = 1024;
constexpr int kMaxOptimizerGroups = 1024;
constexpr int kMaxTrainerStates = 8;
constexpr size_t kMaxAddressBytes = 256;
constexpr int kMaxKeepEvery = 1'000'000;
constexpr int64_t kMaxTimeoutMs = int64_t{365} * 24 * 3600 * 1000;

template <typename... Text>
absl::Status ConfigError(absl::string_view field, const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat("plan config ", field, ": ", text...));
}

template <typename Enum, typename IsValid>
absl::Status CheckEnum(absl::string_view field, Enum value, IsValid is_valid) {
  if (!is_valid(value)) {
    return ConfigError(field, "unknown value (got ", static_cast<int>(value), ")");
  }
  return absl::OkStatus();
}

absl::Status CheckEnums(const v1::JobConfig& config) {
  SHARDD_RETURN_IF_ERROR(CheckEnum("strategy", config.strategy(), v1::Strategy_IsValid));
  SHARDD_RETURN_IF_ERROR(CheckEnum("layout", config.layout(), v1::Layout_IsValid));
  SHARDD_RETURN_IF_ERROR(CheckEnum("unshard_mode", config.unshard_mode(), v1::UnshardMode_IsValid));
  SHARDD_RETURN_IF_ERROR(CheckEnum("offload", config.offload(), v1::Offload_IsValid));
  SHARDD_RETURN_IF_ERROR(CheckEnum("backward_prefetch", config.backward_prefetch(), v1::BackwardPrefetch_IsValid));
  // A kind that a newer client knows arrives as its number.
  const v1::OptimizerKind kind = config.optimizer().kind();
  if (kind != v1::OPTIMIZER_KIND_UNSPECIFIED && FindOptimizerKind(kind) == nullptr) {
    return ConfigError("optimizer.kind", "unknown value (got ", OptimizerKindText(kind), ", want ",
                       absl::StrJoin(OptimizerKinds(), ", ",
                                     [](std::string* out, const OptimizerKindRow& row) {
                                       absl::StrAppend(out, v1::OptimizerKind_Name(row.kind));
                                     }),
                       "); use a daemon and a library that know it");
  }
  return absl::OkStatus();
}

// Of the row's kind, a momentum buffer is asked for.
absl::Status CheckMomentumOf(absl::string_view field, v1::OptimizerKind kind) {
  const OptimizerKindRow* const row = FindOptimizerKind(kind);
  if (row == nullptr || row->momentum_state == nullptr) {
    return ConfigError(field, "only SGD and RMSprop have a momentum buffer (got ", OptimizerKindText(kind),
                       ", want OPTIMIZER_KIND_SGD, OPTIMIZER_KIND_RMSPROP or OPTIMIZER_KIND_CENTERED_RMSPROP)");
  }
  return absl::OkStatus();
}

// Several optimizers: each group says its own, and the daemon makes the steps of all.
absl::Status CheckOptimizerGroups(const v1::OptimizerConfig& optimizer) {
  const bool several = HasSeveralOptimizers(optimizer);
  for (int g = 0; g < optimizer.groups_size(); ++g) {
    const v1::OptimizerConfig::Group& group = optimizer.groups(g);
    const std::string field = absl::StrCat("optimizer.groups[", g, "].");
    const bool has_kind = group.kind() != v1::OPTIMIZER_KIND_UNSPECIFIED;
    if (has_kind != several || (!has_kind && group.momentum())) {
      return ConfigError(field + "kind", "all groups have one, or none (got ", OptimizerKindText(group.kind()),
                         group.momentum() ? " with momentum" : "", ", and ",
                         OptimizerKindText(optimizer.groups(0).kind()), " in group 0)");
    }
    const OptimizerKindRow* const row = has_kind ? FindOptimizerKind(group.kind()) : nullptr;
    if (has_kind && (row == nullptr || !row->in_daemon)) {
      return ConfigError(field + "kind", "the daemon steps no such optimizer (got ", OptimizerKindText(group.kind()),
                         "); use a daemon and a library that know it");
    }
    if (group.momentum()) {
      SHARDD_RETURN_IF_ERROR(CheckMomentumOf(field + "momentum", group.kind()));
    }
  }
  if (several && OptimizerGroups(optimizer) == 0) {
    return ConfigError("optimizer.kind", "groups have kinds of their own, and the daemon steps none (got ",
                       OptimizerKindText(optimizer.kind()), ", want one of theirs)");
  }
  return absl::OkStatus();
}

absl::Status CheckLowPrecision(absl::string_view where, absl::string_view field, DType dtype) {
  if (dtype != v1::DTYPE_UNSPECIFIED && !IsTrainable(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(where, "mixed_precision.", field,
                                                   ": not a dtype to compute in (got ", DTypeName(dtype),
                                                   ", want float32, bfloat16 or float16)"));
  }
  return absl::OkStatus();
}

absl::Status CheckTimeout(absl::string_view field, int64_t value) {
  if (value < 0 || value > kMaxTimeoutMs) {
    return ConfigError(field, "out of range (got ", value, ", want 0 to ", kMaxTimeoutMs, ")");
  }
  return absl::OkStatus();
}

absl::Status CheckValues(const v1::JobConfig& config) {
  SHARDD_RETURN_IF_ERROR(CheckMixedPrecision("plan config ", config.mixed_precision()));
  if (config.max_inflight_unshards() < 0 || config.max_inflight_unshards() > kMaxInflightUnshards) {
    return ConfigError("max_inflight_unshards", "out of range (got ", config.max_inflight_unshards(), ", want 0 to ",
                       kMaxInflightUnshards, ")");
  }
  const double factor = config.gradient_divide_factor();
  if (!std::isfinite(factor) || factor < 0) {
    return ConfigError("gradient_divide_factor", "out of range (got ", factor, ", want a finite number >= 0)");
  }
  SHARDD_RETURN_IF_ERROR(CheckTimeout("silence_timeout_ms", config.silence_timeout_ms()));
  SHARDD_RETURN_IF_ERROR(CheckTimeout("grace_ms", config.grace_ms()));
  if (config.compare_every() < 0) {
    return ConfigError("compare_every", "out of range (got ", config.compare_every(), ", want 0 or more)");
  }
  if (config.keep_every() < 0 || config.keep_every() > kMaxKeepEvery) {
    return ConfigError("keep_every", "out of range (got ", config.keep_every(), ", want 0 to ", kMaxKeepEvery, ")");
  }
  const bool in_trainers = config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  if (config.optimizer().trainer_states() < 0 ||
      config.optimizer().trainer_states() > (in_trainers ? kMaxTrainerStates : 0)) {
    return ConfigError("optimizer.trainer_states", "out of range (got ", config.optimizer().trainer_states(),
                       ", want 0", in_trainers ? absl::StrCat(" to ", kMaxTrainerStates) : "", " with ",
                       v1::OptimizerKind_Name(config.optimizer().kind()), ")");
  }
  if (in_trainers && config.trainers_never_write()) {
    return ConfigError("trainers_never_write", "an optimizer in the trainers writes (got true, want false)");
  }
  if (config.pass_copies() && config.trainers_never_write()) {
    return ConfigError("pass_copies",
                       "no trainer writes what they are copies of (got true with trainers_never_write, "
                       "want false)");
  }
  if (config.optimizer().groups_size() > kMaxOptimizerGroups) {
    return ConfigError("optimizer.groups", "too many (got ", config.optimizer().groups_size(),
                       ", want <= ", kMaxOptimizerGroups, ")");
  }
  if (config.optimizer().momentum()) {
    SHARDD_RETURN_IF_ERROR(CheckMomentumOf("optimizer.momentum", config.optimizer().kind()));
  }
  return CheckOptimizerGroups(config.optimizer());
}

std::string FieldText(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field) {
  using google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.GetEnum(message, &field)->name();
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(reflection.GetInt32(message, &field));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(reflection.GetInt64(message, &field));
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(reflection.GetUInt32(message, &field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return absl::StrFormat("%.9g", reflection.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrFormat("%.17g", reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return "";
}

void AppendFields(const google::protobuf::Message& message, const std::string& prefix,
                  std::vector<std::pair<std::string, std::string>>& fields) {
  const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *descriptor.field(i);
    const std::string path = absl::StrCat(prefix, field.name());
    if (field.is_repeated() && field.number() == v1::JobConfig::kShardGroupsFieldNumber &&
        &descriptor == v1::JobConfig::descriptor()) {
      fields.emplace_back(path, ShardGroupsText(static_cast<const v1::JobConfig&>(message)));
    } else if (&descriptor == v1::Nodes::descriptor()) {
      fields.emplace_back(path, absl::StrJoin(static_cast<const v1::Nodes&>(message).addresses(), ", "));
    } else if (field.is_repeated()) {
      // optimizer.groups: their number is the number of hyperparameters in a Step.
      fields.emplace_back(path + ".size", absl::StrCat(message.GetReflection()->FieldSize(message, &field)));
    } else if (field.cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
      AppendFields(message.GetReflection()->GetMessage(message, &field), path + ".", fields);
    } else {
      fields.emplace_back(path, FieldText(message, field));
    }
  }
}

// Several nodes: checks what the daemons of one job can do together.
absl::Status CheckNodes(const v1::JobConfig& config, int world_size) {
  const int count = config.nodes().addresses_size();
  if (!config.has_nodes()) {
    return absl::OkStatus();
  }
  if (count < 2 || count > kMaxNodes) {
    return ConfigError("nodes.addresses", "out of range (got ", count, " addresses, want 2 to ", kMaxNodes, ")");
  }
  // No commas: lists that differ must read differently.
  const auto is_address = [](absl::string_view address) {
    return !address.empty() && std::all_of(address.begin(), address.end(),
                                           [](unsigned char c) { return absl::ascii_isgraph(c) && c != ','; });
  };
  absl::flat_hash_set<absl::string_view> seen;
  for (const std::string& address : config.nodes().addresses()) {
    const char* const fact = address.size() > kMaxAddressBytes ? "too long"
                             : !is_address(address)            ? "empty, or no address"
                             : !seen.insert(address).second    ? "given twice"
                                                               : nullptr;
    if (fact != nullptr) {
      return ConfigError("nodes.addresses", fact, " (got \"", absl::CHexEscape(address.substr(0, kMaxAddressBytes)),
                         "\", want \"host:port\" of each node's daemon)");
    }
  }
  const auto refuse = [](const auto&... text) {
    return absl::UnimplementedError(absl::StrCat("plan config nodes: ", text...));
  };
  const v1::Strategy strategy = config.strategy();
  const int row = NodesOfRow(config, world_size);
  if (row > 1) {
    if (int64_t{row} * world_size > kMaxPlaces) {
      return ConfigError("nodes.addresses", "too many ranks to be cut over (got ", row, " nodes of ", world_size,
                         ", want at most ", kMaxPlaces, " together)");
    }
    const v1::Placement& placement = config.placement();
    for (const v1::Spread spread : {placement.parameters(), placement.gradients(), placement.optimizer()}) {
      // Cut over all nodes, the shard group is the world.
      if (spread == v1::SPREAD_REPLICATED || (row < count && spread != v1::SPREAD_SHARD_GROUP)) {
        return refuse("what is cut over nodes is cut alike (got placement ", v1::Spread_Name(spread), " with ",
                      v1::Strategy_Name(strategy), ", want none)");
      }
    }
    if (config.unshard_mode() == v1::UNSHARD_MODE_ZERO_COPY) {
      return refuse(
          "what other nodes hold is gathered into the unsharded pool (got unshard_mode "
          "UNSHARD_MODE_ZERO_COPY with ",
          v1::Strategy_Name(strategy), ", want UNSHARD_MODE_POOLED or none)");
    }
  }
  const bool in_trainers = config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool edits = !config.trainers_never_write() && !in_trainers;
  if (edits && config.pass_copies()) {  // which a daemon with GPUs fills in
    return refuse(
        "edits in place beside an optimizer of the daemon's are not served on several nodes where passes read ",
        "copies (got pass_copies true with ", v1::OptimizerKind_Name(config.optimizer().kind()),
        " and trainers_never_write false, want pass_copies false, which is for CPUs alone, or "
        "trainers_never_write true)");
  }
  if (!config.trainers_never_write() && config.replica_copies()) {
    return refuse("copies for replicas within a node are not served with ",
                  in_trainers ? "an optimizer in the trainers" : "edits in place",
                  " (got replica_copies true, want false)");
  }
  if (in_trainers && config.keep_every() > 1) {
    return refuse("with an optimizer in the trainers each pass has its snapshot, to which all nodes can go back (got ",
                  "keep_every ", config.keep_every(), ", want 0 or 1)");
  }
  if (config.offload() == v1::OFFLOAD_HOST) {
    return refuse("offload to the host is not served on several nodes (got OFFLOAD_HOST, want OFFLOAD_NONE)");
  }
  if (config.trainer_sums()) {
    return refuse("gradients of several nodes are added by the daemons (got trainer_sums true, want false)");
  }
  return absl::OkStatus();
}

}  // namespace

int NodesOfRow(const v1::JobConfig& filled, int world_size) {
  const int nodes = std::max(1, filled.nodes().addresses_size());
  const StrategyRow::Groups groups = RowOf(filled.strategy()).groups;
  if (groups == StrategyRow::Groups::kGiven) return std::max(1, filled.shard_group_size() / world_size);
  return groups == StrategyRow::Groups::kWorld ? nodes : 1;
}

absl::Status CheckMixedPrecision(absl::string_view where, const v1::MixedPrecision& precision) {
  SHARDD_RETURN_IF_ERROR(CheckLowPrecision(where, "param_dtype", precision.param_dtype()));
  return CheckLowPrecision(where, "reduce_dtype", precision.reduce_dtype());
}

absl::StatusOr<v1::JobConfig> FillConfig(const v1::JobConfig& config, int world_size) {
  SHARDD_RETURN_IF_ERROR(CheckEnums(config));
  SHARDD_RETURN_IF_ERROR(CheckValues(config));
  SHARDD_RETURN_IF_ERROR(CheckShardGroupCount(config, world_size));
  v1::JobConfig filled = config;
  if (filled.strategy() == v1::STRATEGY_UNSPECIFIED) {
    filled.set_strategy(v1::STRATEGY_FULL_SHARD);
  }
  SHARDD_RETURN_IF_ERROR(FillPlacement(filled, world_size));
  if (filled.layout() == v1::LAYOUT_UNSPECIFIED) {
    filled.set_layout(v1::LAYOUT_FLAT);
  }
  if (filled.offload() == v1::OFFLOAD_UNSPECIFIED) {
    filled.set_offload(v1::OFFLOAD_NONE);
  }
  filled.set_trainer_sums(filled.trainer_sums());  // unset means false here; the daemon may have filled it in before
  SHARDD_RETURN_IF_ERROR(CheckNodes(filled, world_size));
  const bool offloaded = filled.offload() == v1::OFFLOAD_HOST;
  if (offloaded && filled.trainer_sums()) {
    return absl::UnimplementedError(
        "plan config trainer_sums: gradients that the host keeps are added by the daemon (got trainer_sums true with "
        "OFFLOAD_HOST, want false)");
  }
  if (filled.unshard_mode() == v1::UNSHARD_MODE_UNSPECIFIED) {
    const bool gathers = offloaded || NodesOfRow(filled, world_size) > 1;
    filled.set_unshard_mode(gathers ? v1::UNSHARD_MODE_POOLED : v1::UNSHARD_MODE_ZERO_COPY);
  }
  if (offloaded && filled.unshard_mode() != v1::UNSHARD_MODE_POOLED) {
    return ConfigError("offload", "OFFLOAD_HOST gathers parameters into the unsharded pool (got unshard_mode ",
                       v1::UnshardMode_Name(filled.unshard_mode()), ", want UNSHARD_MODE_POOLED or none)");
  }
  const bool is_pooled = filled.unshard_mode() == v1::UNSHARD_MODE_POOLED;
  const int most_pools = is_pooled ? world_size : 0;
  if (filled.unsharded_pools() < 0 || filled.unsharded_pools() > most_pools) {
    return ConfigError("unsharded_pools", "out of range (got ", filled.unsharded_pools(), ", want 0 to ", most_pools,
                       " with ", v1::UnshardMode_Name(filled.unshard_mode()), ")");
  }
  if (is_pooled && filled.unsharded_pools() == 0) {
    filled.set_unsharded_pools(1);
  }
  if (filled.max_inflight_unshards() == 0) {
    filled.set_max_inflight_unshards(2);
  }
  if (filled.backward_prefetch() == v1::BACKWARD_PREFETCH_UNSPECIFIED) {
    filled.set_backward_prefetch(v1::BACKWARD_PREFETCH_PRE);
  }
  if (filled.optimizer().kind() == v1::OPTIMIZER_KIND_UNSPECIFIED) {
    filled.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  }
  if (filled.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER) {
    filled.set_pass_copies(true);  // every step stores into the shards, and nobody sees when
  }
  if (filled.keep_every() == 0 && !filled.trainers_never_write()) {
    const bool rarely = filled.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER && !filled.has_nodes();
    filled.set_keep_every(rarely ? 10 : 1);
  }
  const bool daemon_updates = OptimizerGroups(filled.optimizer()) > 0;
  if (filled.keep_every() > 1 && (daemon_updates || !filled.pass_copies())) {
    return ConfigError("keep_every",
                       "it counts passes that read copies, and the moments of the daemon's optimizer are not kept with "
                       "them: elsewhere shards are kept with every commit (got ",
                       filled.keep_every(), " with ", v1::OptimizerKind_Name(filled.optimizer().kind()),
                       filled.pass_copies() ? "" : " and without pass_copies", ", want 0 or 1)");
  }
  if (filled.gradient_divide_factor() == 0) {  // also -0.0
    filled.set_gradient_divide_factor(world_size * std::max(1, filled.nodes().addresses_size()));
  }
  if (filled.compare_every() == 0 && filled.has_nodes()) {
    filled.set_compare_every(1000);
  }
  if (filled.silence_timeout_ms() == 0) {
    filled.set_silence_timeout_ms(120'000);
  }
  if (filled.grace_ms() == 0) {
    filled.set_grace_ms(900'000);  // a restart loads its program and data, and may wait for a node to be replaced
  }
  return filled;
}

std::vector<std::pair<std::string, std::string>> ConfigFields(const v1::JobConfig& filled) {
  std::vector<std::pair<std::string, std::string>> fields;
  AppendFields(filled, "", fields);
  // Nodes come first: their number decides the default of another field, which would differ first and explain nothing.
  const auto nodes =
      std::find_if(fields.begin(), fields.end(), [](const auto& field) { return field.first == "nodes.addresses"; });
  std::rotate(fields.begin(), nodes, nodes + 1);
  return fields;
}

}  // namespace shardd::plan_internal
