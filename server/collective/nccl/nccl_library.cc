#include "server/collective/nccl/nccl_library.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/process/environment.h"

namespace shardd {
namespace {

constexpr char kRuntimeConnect[] = "NCCL_RUNTIME_CONNECT";

std::string VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

absl::StatusOr<NcclLibrary> NcclLibrary::Load(const std::string& library) {
  const auto refuse = [&library](absl::string_view fact) {
    return absl::FailedPreconditionError(
        absl::StrCat("load NCCL \"", library, "\": ", fact,
                     "; install it (pip's nvidia-nccl-cu13 has it under nvidia/nccl/lib), or give its path with "
                     "--nccl_library, or run without --collective=nccl"));
  };
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: it has threads of its own
  if (handle == nullptr) {
    const char* const why = dlerror();
    return refuse(absl::StrCat("it cannot be loaded (", why == nullptr ? "no reason given" : why, ")"));
  }
  nccl::Table table;
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    void* const address = dlsym(handle, name);
    if (address == nullptr) absl::StrAppend(&missing, missing.empty() ? "" : ", ", name);
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(address);
  };
#define SHARDD_NCCL_RESOLVE(name) resolve("nccl" #name, &table.name);
  SHARDD_NCCL_FUNCTIONS(SHARDD_NCCL_RESOLVE)
#undef SHARDD_NCCL_RESOLVE
  if (!missing.empty()) return refuse(absl::StrCat("it has no ", missing));
#define SHARDD_NCCL_RESOLVE(name) resolve("nccl" #name, &table.name);
  SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_NCCL_RESOLVE)  // a library without these is accepted
#undef SHARDD_NCCL_RESOLVE
  int version = 0;
  if (table.GetVersion(&version) != ncclSuccess || version < nccl::kLeastVersion) {
    return refuse(absl::StrCat("it is too old (got ", VersionText(version), ", want ", VersionText(nccl::kLeastVersion),
                               " or later)"));
  }
  return NcclLibrary(table, version);
}

std::string NcclLibrary::version() const { return VersionText(version_); }

void NcclLibrary::SetEnvironment() {
  setenv("NCCL_RAS_ENABLE", "0", /*overwrite=*/0);
  setenv(kRuntimeConnect, "0", /*overwrite=*/0);
}

std::string NcclLibrary::Settings() {
  return absl::StrCat("NCCL with ", kRuntimeConnect, "=", Environment(kRuntimeConnect));
}

int NcclLibrary::cta_policy() const {
  return NCCL_CTA_POLICY_ZERO | (version_ >= nccl::kPoliciesTogetherVersion ? NCCL_CTA_POLICY_EFFICIENCY : 0);
}

std::string NcclLibrary::cta_policy_text() const {
  return (cta_policy() & NCCL_CTA_POLICY_EFFICIENCY) != 0 ? "zero and efficiency" : "zero";
}

bool NcclLibrary::has_windows() const {
  return table_.CommWindowRegister != nullptr && table_.CommWindowDeregister != nullptr;
}

absl::Status NcclLibrary::Check(ncclResult_t result, absl::string_view operation, absl::string_view object) const {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* const text = table_.GetErrorString(result);
  const char* const last = table_.GetLastError(nullptr);
  return absl::InternalError(absl::StrCat(operation, " ", object, ": ", text == nullptr ? "no text" : text, " (result ",
                                          result, ")", last == nullptr || *last == '\0' ? "" : ": ",
                                          last == nullptr ? "" : last));
}

}  // namespace shardd
