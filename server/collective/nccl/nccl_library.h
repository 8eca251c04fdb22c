#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_LIBRARY_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/collective/nccl/nccl_api.h"

namespace shardd {

// The machine's NCCL, found at run time: nothing of it is linked. Immutable.
class NcclLibrary {
 public:
  static constexpr char kDefault[] = "libnccl.so.2";
  // Sets NCCL_RAS_ENABLE=0 unless the variable has a value: NCCL's diagnosis service listens on one port per machine,
  // which belongs to trainers' jobs. Likewise NCCL_RUNTIME_CONNECT=0: sums' connections are made with the communicator
  // instead of in the first sum, which would hold the GPU's issuing thread until all other nodes sum, too. REQUIRES: no
  // other thread has started.
  static void SetEnvironment();
  // On what all nodes of a job have to agree: "NCCL with NCCL_RUNTIME_CONNECT=0".
  static std::string Settings();
  // Loads `library`, a name or a path, with dlopen. FAILED_PRECONDITION: there is no such library, it lacks a function,
  // or it is older than 2.28; the text says what was looked for and where to get it. The library stays loaded.
  static absl::StatusOr<NcclLibrary> Load(const std::string& library = kDefault);
  // REQUIRES: every pointer is set, except perhaps those of windows.
  NcclLibrary(const nccl::Table& table, int version) : table_(table), version_(version) {}

  const nccl::Table* operator->() const { return &table_; }
  std::string version() const;  // "2.28.9"
  // Use of multiprocessors by communicators (ncclConfig_t::CTAPolicy), as trainers compute on these: none if the
  // library can, and otherwise as few as suffice. A library that takes both bits gets both.
  int cta_policy() const;
  std::string cta_policy_text() const;  // "zero and efficiency"
  bool has_windows() const;

  // OK for kSuccess and kInProgress. Otherwise INTERNAL, "ncclReduce on cuda:1: unhandled cuda error: ... (result 1)",
  // with the library's last error text.
  absl::Status Check(ncclResult_t result, absl::string_view operation, absl::string_view object) const;

 private:
  nccl::Table table_;
  int version_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_LIBRARY_H_
