#ifndef SHARDD_SERVER_TENANT_TENANT_H_
#define SHARDD_SERVER_TENANT_TENANT_H_

// Whose a job is, and who may have what of it. Containers may share a uid, so a job may have a secret besides.

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// What the daemon keeps of a secret: its SHA-256, salted with random bytes of this process, so that digests are
// comparable here and nowhere else. Immutable.
using SecretDigest = std::array<uint8_t, 32>;

// The salt of this process's digests: random, unless digests that another process has made are to be used here, whose
// salt UseSecretSalt takes before any secret was seen.
const std::string& SecretSalt();
void UseSecretSalt(std::string salt);

// A secret as a caller gave it, for the time of the call. Immutable.
class JobSecret {
 public:
  JobSecret() = default;  // none was given
  // INVALID_ARGUMENT: its length is out of range (common/secret/job_secret.h).
  static absl::StatusOr<JobSecret> Create(absl::string_view secret);

  const std::optional<SecretDigest>& digest() const { return digest_; }
  // Key of the proofs that daemons of `job`'s nodes give each other: 32 bytes, the same in all of them; empty: no
  // secret was given. The secret does not follow from it.
  absl::StatusOr<std::string> LinkKey(absl::string_view job) const;

 private:
  std::string secret_;
  std::optional<SecretDigest> digest_;
};

// The owner of a job, or a caller: the uid as the kernel says it, and the secret that the job was opened with, or that
// the call gives. Immutable; compares in constant time.
struct Tenant {
  uint32_t uid = 0;
  std::optional<SecretDigest> secret = std::nullopt;

  // Whether `caller` may have what this tenant owns: it has the uid, and the secret where there is one. A secret that
  // nobody asks for does not matter here.
  bool Admits(const Tenant& caller) const;
  // Whether it is the user that this daemon runs as, without a secret: who could stop the daemon anyway.
  bool IsTheDaemons() const;
  // The same uid and secret, or both without.
  friend bool operator==(const Tenant& a, const Tenant& b) {
    return a.secret.has_value() == b.secret.has_value() && a.Admits(b);
  }
};

// Says to a caller with the job's uid that `operation` needs the job's secret. PERMISSION_DENIED.
absl::Status SecretRefused(absl::string_view operation, const Tenant& caller);

// Proof for a link of a job, from node `from` to node `to`, that the sender has the link key; `token` is the link's and
// makes it valid for that link alone. Empty: the key is, or there is no proof because of an internal error.
std::string MakeLinkProof(const std::string& link_key, absl::string_view token, int from, int to);
// Whether `proof` is MakeLinkProof's; both sides must have a key, or none.
bool IsLinkProof(absl::string_view proof, const std::string& link_key, absl::string_view token, int from, int to);

}  // namespace shardd

#endif  // SHARDD_SERVER_TENANT_TENANT_H_
