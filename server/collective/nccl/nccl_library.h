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
  // dlopen(`library`), a name or a path. FAILED_PRECONDITION: no such library, one that lacks a function, or an older
  // one than 2.28; the text says what was looked for and where to get it. The library stays loaded. Before it is
  // loaded, NCCL_RAS_ENABLE=0 is set unless it has a value: its service for diagnosis listens on one port of the
  // machine, which belongs to trainers' jobs. REQUIRES: no other thread reads the environment.
  static absl::StatusOr<NcclLibrary> Load(const std::string& library = kDefault);
  // REQUIRES: every pointer is set, but for windows' perhaps.
  NcclLibrary(const nccl::Table& table, int version) : table_(table), version_(version) {}

  const nccl::Table* operator->() const { return &table_; }
  std::string version() const;  // "2.28.9"
  // How communicators are to use multiprocessors, which trainers compute on (Config::cta_policy): none where the
  // library can do without, and as few as do elsewhere, which are both named to libraries that take both.
  int cta_policy() const;
  std::string cta_policy_text() const;  // "zero and efficiency"
  bool has_windows() const;

  // OK for kSuccess and kInProgress. Else INTERNAL, "ncclReduce on cuda:1: unhandled cuda error: ... (result 1)", with
  // the library's last words.
  absl::Status Check(nccl::Result result, absl::string_view operation, absl::string_view object) const;

 private:
  nccl::Table table_;
  int version_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_LIBRARY_H_
