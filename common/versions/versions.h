#ifndef SHARDD_COMMON_VERSIONS_VERSIONS_H_
#define SHARDD_COMMON_VERSIONS_VERSIONS_H_

// Which versions of what a build speaks and reads: all ranges, and how two of them meet. deploy/docs/versions.md has
// the table of them, which a test compares with this file, and the rules for raising one.
//
// Values are in build_versions.cc alone, so that a test links a daemon or a library of other versions from the same
// objects (tests/next).

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Both ends are in it.
struct VersionRange {
  int oldest = 0;
  int newest = 0;

  bool Has(int version) const { return oldest <= version && version <= newest; }
  std::string Text() const;  // "13", "13 to 14"
};

// Protos, ring records and page layouts together: between client and daemon, and between the daemons of two nodes.
extern const VersionRange kProtocolVersions;
// Messages between daemon and custodian (server/custodian/wire.h).
extern const VersionRange kCustodyVersions;
// Records of a job with the custodian, and what the job has there (proto/shardd/v1/custody.proto).
extern const VersionRange kCustodyFormats;
// server/storage/journal.h.
extern const VersionRange kJournalFormats;
// server/storage/take_up_log.h, with the logs of updates in it (common/tensor/update_log.h).
extern const VersionRange kTakeUpFormats;

// The protocol of peers that do not say their session's version: it was the only one.
inline constexpr int kUnsaidProtocolVersion = 13;

// What a message says in two fields, of which a reader from before there were ranges knows `oldest` alone. Newest 0: it
// is absent, and its sender speaks one version.
constexpr VersionRange SaidRange(int oldest, int newest) { return {oldest, newest == 0 ? oldest : newest}; }

// A range, and who says it: "the daemon", "this client".
struct Speaker {
  absl::string_view name;
  VersionRange range;
};

// The newest version that both speak. FAILED_PRECONDITION: there is none; says both ranges, and who needs another
// version of shardd. INVALID_ARGUMENT: what they say is no range. `what`: "protocol version".
absl::StatusOr<int> CommonVersion(absl::string_view what, const Speaker& mine, const Speaker& theirs);

// FAILED_PRECONDITION: this build does not read `what` in that format; says which shardd does.
absl::Status CheckFormat(absl::string_view what, int format, VersionRange reads);

}  // namespace shardd

#endif  // SHARDD_COMMON_VERSIONS_VERSIONS_H_
