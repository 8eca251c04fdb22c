// The canonical form: a tag, then every item as a little-endian 64-bit integer or as length and bytes, so that no two
// plans give the same bytes. It leaves out what is computed from these items (offsets, slots, slabs): whoever changes
// those computations raises kFormat, so that a client and a daemon of different builds notice.

#include <openssl/evp.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/config_internal.h"
#include "common/plan/digest_internal.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/placement_internal.h"
#include "common/plan/tree_internal.h"

namespace shardd {
namespace plan_internal {
namespace {

constexpr absl::string_view kFormat = "shardd plan 3";
constexpr absl::string_view kFloat8Field = "mixed_precision.float8_gathers";

class CanonicalHasher {
 public:
  CanonicalHasher() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
    ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
  }

  void Int(int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      buffer_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> shift));
    }
    if (buffer_.size() >= kFlushBytes) {
      Flush();
    }
  }

  void Text(absl::string_view text) {
    Int(static_cast<int64_t>(text.size()));
    buffer_.append(text.data(), text.size());
  }

  absl::StatusOr<std::string> Finish() {
    Flush();
    std::string digest(EVP_MAX_MD_SIZE, '\0');
    unsigned size_bytes = 0;
    ok_ = ok_ && EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()), &size_bytes) == 1;
    if (!ok_) {
      return absl::InternalError("plan digest: the cryptography library has no SHA-256");
    }
    digest.resize(size_bytes);
    return digest;
  }

 private:
  static constexpr size_t kFlushBytes = 1 << 16;

  void Flush() {
    ok_ = ok_ && EVP_DigestUpdate(context_.get(), buffer_.data(), buffer_.size()) == 1;
    buffer_.clear();
  }

  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
  std::string buffer_;
  bool ok_ = false;
};

std::string Differs(absl::string_view what, absl::string_view got, absl::string_view want) {
  return absl::StrCat(what, " differs (got ", Shortened(got), ", want ", Shortened(want), ")");
}

std::string ShapeText(const ParamPlan& param) { return absl::StrCat("[", absl::StrJoin(param.shape, ", "), "]"); }

std::string AliasText(const ParamPlan& param) {
  if (param.aliases.empty()) {
    return "none";
  }
  return absl::StrJoin(param.aliases, ", ",
                       [](std::string* out, const std::string& name) { absl::StrAppend(out, Quoted(name)); });
}

std::string ParamDifference(const ShardPlan& got_plan, const ParamPlan& got, int got_index, const ShardPlan& want_plan,
                            const ParamPlan& want, int want_index) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  if (got.shape != want.shape) {
    return Differs("shape", ShapeText(got), ShapeText(want));
  }
  if (got.dtype != want.dtype) {
    return Differs("dtype", DTypeName(got.dtype), DTypeName(want.dtype));
  }
  if (got.requires_grad != want.requires_grad) {
    return Differs("requires_grad", boolean(got.requires_grad), boolean(want.requires_grad));
  }
  if (got.aliases != want.aliases) {
    return Differs("tied names", AliasText(got), AliasText(want));
  }
  const std::string& got_group = got_plan.groups[got.group].name;
  const std::string& want_group = want_plan.groups[want.group].name;
  if (got_group != want_group) {
    return Differs("parameter group", Quoted(got_group), Quoted(want_group));
  }
  if (got.optimizer_group != want.optimizer_group) {
    return Differs("optimizer group", absl::StrCat(got.optimizer_group), absl::StrCat(want.optimizer_group));
  }
  if (got_index != want_index) {
    return Differs("position in traversal order", absl::StrCat(got_index), absl::StrCat(want_index));
  }
  return "";
}

// REQUIRES: both have as many groups.
std::string OptimizerDifference(const v1::OptimizerConfig& got, const v1::OptimizerConfig& want) {
  const auto text = [](const v1::OptimizerConfig::Group& group) {
    return absl::StrCat(OptimizerKindText(group.kind()), group.momentum() ? " with momentum" : "");
  };
  for (int g = 0; g < want.groups_size(); ++g) {
    if (text(got.groups(g)) != text(want.groups(g))) {
      return Differs(absl::StrCat("config optimizer.groups[", g, "].kind"), text(got.groups(g)), text(want.groups(g)));
    }
  }
  return "";
}

std::string FirstParamDifference(const ShardPlan& got, const ShardPlan& want) {
  for (size_t i = 0; i < want.params.size(); ++i) {
    const ParamPlan& param = want.params[i];
    const auto found = got.param_by_fqn.find(param.fqn);
    if (found == got.param_by_fqn.end()) {
      return absl::StrCat("parameter ", Quoted(param.fqn), ": missing (got no such parameter, want ", ShapeText(param),
                          " ", DTypeName(param.dtype), ")");
    }
    const ParamPlan& other = got.params[found->second];
    if (other.fqn != param.fqn) {
      return absl::StrCat("parameter ", Quoted(param.fqn), ": ",
                          Differs("first use of a tied tensor", Quoted(other.fqn), Quoted(param.fqn)));
    }
    const std::string difference = ParamDifference(got, other, found->second, want, param, static_cast<int>(i));
    // A parameter that exists only in `got` shifts all that follow; report that instead.
    const bool is_shifted = !difference.empty() && other.shape == param.shape && i < got.params.size() &&
                            !want.param_by_fqn.contains(got.params[i].fqn);
    if (!difference.empty() && !is_shifted) {
      return absl::StrCat("parameter ", Quoted(param.fqn), ": ", difference);
    }
    if (is_shifted) {
      break;
    }
  }
  for (const ParamPlan& param : got.params) {
    if (!want.param_by_fqn.contains(param.fqn)) {
      return absl::StrCat("parameter ", Quoted(param.fqn), ": extra (got ", ShapeText(param), " ",
                          DTypeName(param.dtype), ", want no such parameter)");
    }
  }
  return "";
}

std::string GroupNames(const ShardPlan& plan, const std::vector<int>& groups) {
  if (groups.empty()) {
    return "none";
  }
  return absl::StrJoin(groups, ", ",
                       [&plan](std::string* out, int g) { absl::StrAppend(out, Quoted(plan.groups[g].name)); });
}

std::string PrecisionText(const GroupPlan& group) {
  const v1::MixedPrecision& precision = group.mixed_precision;
  const auto name = [](DType dtype, const char* otherwise) {
    return dtype == v1::DTYPE_UNSPECIFIED ? std::string(otherwise) : std::string(DTypeName(dtype));
  };
  return absl::StrCat("param_dtype ", name(precision.param_dtype(), "as stored"), ", reduce_dtype ",
                      name(precision.reduce_dtype(), "as submitted"),
                      precision.keep_low_precision_grads() ? ", kept" : "",
                      precision.float8_gathers() ? ", float8 gathers" : "");
}

std::string FirstGroupDifference(const ShardPlan& got, const ShardPlan& want) {
  for (size_t g = 0; g < want.groups.size(); ++g) {
    const GroupPlan& group = want.groups[g];
    const std::string label = absl::StrCat("group ", Quoted(group.name), ": ");
    const auto found = got.group_by_name.find(group.name);
    if (found == got.group_by_name.end()) {
      return absl::StrCat(label, "missing");
    }
    const GroupPlan& other = got.groups[found->second];
    if (found->second != static_cast<int>(g)) {
      return absl::StrCat(label, Differs("position", absl::StrCat(found->second), absl::StrCat(g)));
    }
    if (other.depth != group.depth) {
      return absl::StrCat(label, Differs("nesting depth", absl::StrCat(other.depth), absl::StrCat(group.depth)));
    }
    if (other.reshard_after_forward != group.reshard_after_forward) {
      return absl::StrCat(label, Differs("reshard_after_forward", other.reshard_after_forward ? "true" : "false",
                                         group.reshard_after_forward ? "true" : "false"));
    }
    if (other.post_forward_shard_size != group.post_forward_shard_size) {
      return absl::StrCat(label, Differs("post_forward_shard_size", absl::StrCat(other.post_forward_shard_size),
                                         absl::StrCat(group.post_forward_shard_size)));
    }
    if (PrecisionText(other) != PrecisionText(group)) {
      return absl::StrCat(label, Differs("mixed_precision", PrecisionText(other), PrecisionText(group)));
    }
    if (other.also_unshards != group.also_unshards) {
      return absl::StrCat(label, Differs("groups that hold its tied parameters", GroupNames(got, other.also_unshards),
                                         GroupNames(want, group.also_unshards)));
    }
  }
  for (const GroupPlan& group : got.groups) {
    if (!want.group_by_name.contains(group.name)) {
      return absl::StrCat("group ", Quoted(group.name), ": extra");
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> PlanDigest(const ShardPlan& plan) {
  CanonicalHasher hasher;
  hasher.Text(kFormat);
  hasher.Int(plan.world_size);
  for (const auto& [path, value] : ConfigFields(plan.config)) {
    if (path == kFloat8Field && value == "false") continue;  // plans without it have the digest of earlier builds
    hasher.Text(path);
    hasher.Text(value);
  }
  hasher.Int(static_cast<int64_t>(plan.params.size()));
  for (const ParamPlan& param : plan.params) {
    hasher.Text(param.fqn);
    hasher.Int(static_cast<int64_t>(param.aliases.size()));
    for (const std::string& alias : param.aliases) {
      hasher.Text(alias);
    }
    hasher.Int(static_cast<int64_t>(param.shape.size()));
    for (int64_t extent : param.shape) {
      hasher.Int(extent);
    }
    hasher.Int(param.dtype);
    hasher.Int(param.requires_grad);
    hasher.Int(param.group);
    hasher.Int(param.optimizer_group);
  }
  if (const v1::OptimizerConfig& optimizer = plan.config.optimizer(); HasSeveralOptimizers(optimizer)) {
    hasher.Text("several optimizers");  // which a build that does not know of them never hashes
    for (const v1::OptimizerConfig::Group& group : optimizer.groups()) {
      hasher.Int(group.kind());
      hasher.Int(group.momentum());
    }
  }
  // Which node has memory for what follows from how matrices are shared out, too.
  const bool any_whole =
      std::any_of(plan.params.begin(), plan.params.end(), [](const ParamPlan& param) { return param.whole_at >= 0; });
  if (any_whole) {
    hasher.Text("places of matrices");
    for (const ParamPlan& param : plan.params) hasher.Int(param.whole_at);
  }
  hasher.Int(static_cast<int64_t>(plan.groups.size()));
  for (const GroupPlan& group : plan.groups) {
    hasher.Text(group.name);
    hasher.Int(group.depth);
    hasher.Int(group.reshard_after_forward);
    hasher.Int(group.post_forward_shard_size);
    hasher.Int(group.mixed_precision.param_dtype());
    hasher.Int(group.mixed_precision.reduce_dtype());
    hasher.Int(group.mixed_precision.keep_low_precision_grads());
    if (group.mixed_precision.float8_gathers()) hasher.Text("float8 gathers");
    hasher.Int(static_cast<int64_t>(group.also_unshards.size()));
    for (int other : group.also_unshards) {
      hasher.Int(other);
    }
  }
  return hasher.Finish();
}

}  // namespace plan_internal

std::string FirstDifference(const v1::JobSpec& got, const v1::JobSpec& want) {
  using namespace plan_internal;  // helpers of this file
  if (got.world_size() != want.world_size()) {
    return Differs("world size", absl::StrCat(got.world_size()), absl::StrCat(want.world_size()));
  }
  const absl::StatusOr<ShardPlan> got_plan = PlanShards(got);
  const absl::StatusOr<ShardPlan> want_plan = PlanShards(want);
  if (!got_plan.ok() || !want_plan.ok()) {
    const bool same = !got_plan.ok() && !want_plan.ok() && got_plan.status() == want_plan.status();
    const auto text = [](const absl::StatusOr<ShardPlan>& plan) {
      return plan.ok() ? "a valid job" : std::string(plan.status().message());
    };
    return same ? "" : Differs("validity", text(got_plan), text(want_plan));
  }
  if (got_plan->digest == want_plan->digest) {
    return "";
  }
  const auto got_fields = ConfigFields(got_plan->config);
  const auto want_fields = ConfigFields(want_plan->config);
  for (size_t i = 0; i < want_fields.size(); ++i) {
    if (got_fields[i].second != want_fields[i].second) {
      return Differs(absl::StrCat("config ", want_fields[i].first), got_fields[i].second, want_fields[i].second);
    }
  }
  if (std::string difference = OptimizerDifference(got_plan->config.optimizer(), want_plan->config.optimizer());
      !difference.empty()) {
    return difference;
  }
  if (std::string difference = FirstParamDifference(*got_plan, *want_plan); !difference.empty()) {
    return difference;
  }
  return FirstGroupDifference(*got_plan, *want_plan);
}

}  // namespace shardd
