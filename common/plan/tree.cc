#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/fqn/fqn.h"
#include "common/plan/plan.h"
#include "common/plan/tree_internal.h"
#include "common/status/status_macros.h"

namespace shardd::plan_internal {
namespace {

constexpr size_t kMaxNameBytes = 4096;  // of a whole path; also bounds the depth
constexpr size_t kMaxQuotedBytes = 256;
constexpr int kMaxDimensions = 64;  // PyTorch's own limit

// Bytes of the UTF-8 sequence at the start of `text`; 0 if it is malformed (overlong, surrogate, beyond U+10FFFF) or a
// control character (C0, DEL, C1), because names appear in terminals, logs and file names.
size_t PrintableSequenceBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto is_tail = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned lead = byte(0);
  if (lead < 0x80) {
    return lead >= 0x20 && lead != 0x7F ? 1 : 0;
  }
  if (lead >= 0xC2 && lead <= 0xDF) {
    return is_tail(1) && !(lead == 0xC2 && byte(1) < 0xA0) ? 2 : 0;
  }
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool overlong = lead == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = lead == 0xED && byte(1) >= 0xA0;
    return is_tail(1) && is_tail(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && byte(1) < 0x90;
    const bool beyond = lead == 0xF4 && byte(1) >= 0x90;
    return is_tail(1) && is_tail(2) && is_tail(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

bool IsPrintableUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t size_bytes = PrintableSequenceBytes(text);
    if (size_bytes == 0) {
      return false;
    }
    text.remove_prefix(size_bytes);
  }
  return true;
}

absl::Status CheckText(absl::string_view what, absl::string_view name) {
  if (name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("plan ", what, " ", Quoted(name), ": name is too long (got ",
                                                   name.size(), " bytes, want <= ", kMaxNameBytes, ")"));
  }
  if (!IsPrintableUtf8(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan ", what, " ", Quoted(name), ": name has control characters or is not UTF-8"));
  }
  return absl::OkStatus();
}

bool IsDottedPath(absl::string_view path) {
  return !path.empty() && path.front() != '.' && path.back() != '.' && !absl::StrContains(path, "..");
}

// Checks everything about modules[index] except its parameters. `open` is the chain of modules from the root to the
// previous one.
absl::Status CheckModule(const v1::ModuleTree& tree, int index, std::vector<int>& open) {
  const v1::Module& module = tree.modules(index);
  SHARDD_RETURN_IF_ERROR(CheckText("module", module.name()));
  SHARDD_RETURN_IF_ERROR(CheckText("class", module.class_name()));
  const auto error = [&module](const auto&... text) {
    return absl::InvalidArgumentError(absl::StrCat("plan module ", Quoted(module.name()), ": ", text...));
  };
  if (!v1::ModuleMark_IsValid(module.mark())) {
    return error("unknown mark (got ", static_cast<int>(module.mark()), ")");
  }
  if (!v1::Override_IsValid(module.reshard_after_forward())) {
    return error("unknown reshard_after_forward (got ", static_cast<int>(module.reshard_after_forward()), ")");
  }
  if (index == 0) {
    if (module.parent() != -1 || !module.name().empty()) {
      return error("modules[0] is not a root (got parent ", module.parent(), ", want parent -1 and an empty name)");
    }
    open.push_back(0);
    return absl::OkStatus();
  }
  // A parent that precedes its children also rules out cycles.
  if (module.parent() < 0 || module.parent() >= index) {
    return error("parent is out of order (got ", module.parent(), ", want 0 <= parent < ", index, ")");
  }
  while (!open.empty() && open.back() != module.parent()) {
    open.pop_back();
  }
  if (open.empty()) {
    return error("modules are not in depth-first pre-order (parent ", module.parent(), " was left before module ",
                 index, ")");
  }
  open.push_back(index);
  const absl::string_view parent = tree.modules(module.parent()).name();
  absl::string_view rest = module.name();
  const bool below = parent.empty() || (absl::ConsumePrefix(&rest, parent) && absl::ConsumePrefix(&rest, "."));
  if (!below || !IsDottedPath(rest)) {
    return error("name is not a path below its parent's (parent ", Quoted(parent), ")");
  }
  return absl::OkStatus();
}

bool LeavesOut(v1::ModuleMark mark) {
  return mark == v1::MODULE_MARK_IGNORED || mark == v1::MODULE_MARK_REPLICATE ||
         mark == v1::MODULE_MARK_ALREADY_SHARDED;
}

std::string CleanModuleFqn(const v1::Module& module, absl::string_view parent_name, absl::string_view parent_fqn) {
  if (module.is_wrapper()) {
    return std::string(parent_fqn);
  }
  const absl::string_view rest =
      absl::string_view(module.name()).substr(parent_name.empty() ? 0 : parent_name.size() + 1);
  return CleanFqn(JoinFqn(parent_fqn, rest));
}

absl::StatusOr<int64_t> CheckParam(const v1::Parameter& param, absl::string_view fqn) {
  const auto error = [&](auto&&... text) {
    return absl::InvalidArgumentError(absl::StrCat("plan parameter ", Quoted(fqn), ": ", text...));
  };
  if (DTypeSizeBytes(param.dtype()) == 0) {
    return error("unknown dtype (got ", static_cast<int>(param.dtype()), ")");
  }
  if (param.requires_grad() && !IsFloatingPoint(param.dtype())) {
    return error("dtype cannot be trained (got ", DTypeName(param.dtype()),
                 ", want float32, bfloat16, float16 or float64); convert it or set requires_grad to false");
  }
  if (param.shape_size() > kMaxDimensions) {
    return error("too many dimensions (got ", param.shape_size(), ", want <= ", kMaxDimensions, ")");
  }
  int64_t numel = 1;
  for (int d = 0; d < param.shape_size(); ++d) {
    const int64_t extent = param.shape(d);
    if (extent < 1) {
      return error("extent of dimension ", d, " is out of range (got ", extent, ", want >= 1)");
    }
    if (extent > kMaxJobNumel / numel) {
      return error("too many elements (got shape [", absl::StrJoin(param.shape(), ", "), "], want <= ", kMaxJobNumel,
                   ")");
    }
    numel *= extent;
  }
  return numel;
}

absl::Status CheckTied(const TreeParam& first, const v1::Parameter& param, absl::string_view fqn) {
  const v1::Parameter& stored = *first.declared;
  const bool same =
      stored.dtype() == param.dtype() && stored.requires_grad() == param.requires_grad() &&
      std::equal(stored.shape().begin(), stored.shape().end(), param.shape().begin(), param.shape().end());
  if (same) {
    return absl::OkStatus();
  }
  const auto text = [](const v1::Parameter& p) {
    return absl::StrCat("[", absl::StrJoin(p.shape(), ", "), "] ", DTypeName(p.dtype()),
                        p.requires_grad() ? "" : " frozen");
  };
  return absl::InvalidArgumentError(absl::StrCat("plan parameter ", Quoted(fqn), ": differs from ", Quoted(first.fqn),
                                                 " to which storage_id ", param.storage_id(), " ties it (got ",
                                                 text(param), ", want ", text(stored), ")"));
}

// Reads parameters in traversal order. REQUIRES: modules are checked and named.
class ParamReader {
 public:
  ParamReader(const v1::ModuleTree& tree, ManagedTree& out) : tree_(tree), out_(out) {}

  absl::Status Read() {
    FindLeftOutStorages();
    for (int m = 0; m < tree_.modules_size(); ++m) {
      if (!out_.managed[m]) {
        continue;
      }
      for (const v1::Parameter& param : tree_.modules(m).parameters()) {
        SHARDD_RETURN_IF_ERROR(ReadOne(m, param));
      }
    }
    return absl::OkStatus();
  }

 private:
  void FindLeftOutStorages() {
    for (int m = 0; m < tree_.modules_size(); ++m) {
      for (const v1::Parameter& param : tree_.modules(m).parameters()) {
        if (param.storage_id() != 0 && (!out_.managed[m] || param.already_sharded())) {
          left_out_storages_.insert(param.storage_id());
        }
      }
    }
  }

  absl::Status ReadOne(int m, const v1::Parameter& param) {
    const std::string& module_fqn = out_.fqns[m];
    std::string fqn = JoinFqn(module_fqn, param.name());
    SHARDD_RETURN_IF_ERROR(CheckText("parameter", fqn));
    // A name that cleaning would remove ("_flat_param": something has flattened it already) names nothing.
    if (param.name().empty() || absl::StrContains(param.name(), ".") || CleanFqn(fqn) != fqn) {
      return absl::InvalidArgumentError(absl::StrCat("plan parameter ", Quoted(fqn), ": not a parameter name (got ",
                                                     Quoted(param.name()),
                                                     ", want one without dots or wrapper prefix)"));
    }
    if (param.already_sharded() || (param.storage_id() != 0 && left_out_storages_.contains(param.storage_id()))) {
      return absl::OkStatus();
    }
    SHARDD_ASSIGN_OR_RETURN(const int64_t numel, CheckParam(param, fqn));
    if (param.storage_id() != 0) {
      const auto [it, is_first] = by_storage_.try_emplace(param.storage_id(), static_cast<int>(out_.params.size()));
      if (!is_first) {
        SHARDD_RETURN_IF_ERROR(CheckTied(out_.params[it->second], param, fqn));
        out_.tied_uses.push_back({it->second, m, std::move(fqn)});
        return absl::OkStatus();
      }
    }
    if (numel > kMaxJobNumel - total_numel_) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan parameter ", Quoted(fqn), ": the job has too many elements (want <= ", kMaxJobNumel, ")"));
    }
    total_numel_ += numel;
    out_.params.push_back({&param, m, std::move(fqn), numel});
    return absl::OkStatus();
  }

  const v1::ModuleTree& tree_;
  ManagedTree& out_;
  absl::flat_hash_set<uint64_t> left_out_storages_;
  absl::flat_hash_map<uint64_t, int> by_storage_;
  int64_t total_numel_ = 0;
};

}  // namespace

std::string Quoted(absl::string_view name) {
  const absl::string_view shown = name.substr(0, kMaxQuotedBytes);
  return absl::StrCat("\"", IsPrintableUtf8(shown) ? std::string(shown) : absl::CHexEscape(shown),
                      shown.size() < name.size() ? "..." : "", "\"");
}

absl::StatusOr<ManagedTree> ReadTree(const v1::ModuleTree& tree) {
  const int modules = tree.modules_size();
  if (modules < 1 || modules > kMaxModules) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan tree: number of modules is out of range (got ", modules, ", want 1 to ", kMaxModules, ")"));
  }
  int64_t declared = 0;
  for (const v1::Module& module : tree.modules()) {
    declared += module.parameters_size();
  }
  if (declared > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan tree: too many parameters (got ", declared, ", want <= ", kMaxParameters, ")"));
  }

  ManagedTree out;
  out.fqns.reserve(modules);
  out.managed.reserve(modules);
  std::vector<int> open;
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(modules);
  for (int m = 0; m < modules; ++m) {
    SHARDD_RETURN_IF_ERROR(CheckModule(tree, m, open));
    const v1::Module& module = tree.modules(m);
    if (!names.insert(module.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan module ", Quoted(module.name()), ": two modules have this name"));
    }
    const bool is_root = m == 0;
    out.fqns.push_back(
        is_root ? "" : CleanModuleFqn(module, tree.modules(module.parent()).name(), out.fqns[module.parent()]));
    out.managed.push_back((is_root || out.managed[module.parent()]) && !LeavesOut(module.mark()));
  }
  out.params.reserve(declared);
  SHARDD_RETURN_IF_ERROR(ParamReader(tree, out).Read());
  if (out.params.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan tree: no parameters to manage (got ", declared, " parameters, all left out)"));
  }
  return out;
}

absl::Status CheckJobName(absl::string_view name) {
  const bool legal = !name.empty() && name.size() <= 128 && name != "." && name != ".." &&
                     std::all_of(name.begin(), name.end(), [](unsigned char c) {
                       return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
                     });
  if (!legal) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan job ", Quoted(name), ": not a job name (want 1 to 128 characters of [A-Za-z0-9._-])"));
  }
  return absl::OkStatus();
}

}  // namespace shardd::plan_internal
