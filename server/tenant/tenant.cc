#include "server/tenant/tenant.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/secret/job_secret.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

bool IsSame(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// HMAC-SHA-256. INTERNAL: the cryptography library has none.
absl::StatusOr<SecretDigest> Mac(absl::string_view key, absl::string_view data) {
  SecretDigest mac;
  unsigned size_bytes = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(data.data()),
           data.size(), mac.data(), &size_bytes) == nullptr ||
      size_bytes != mac.size()) {
    return absl::InternalError("job secret: the cryptography library has no SHA-256");
  }
  return mac;
}

absl::string_view Bytes(const SecretDigest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// Empty: the machine gives no random bytes.
std::string* Salt() {
  static std::string* const salt = [] {
    auto* bytes = new std::string(32, '\0');
    if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes->data()), static_cast<int>(bytes->size())) != 1) {
      bytes->clear();
    }
    return bytes;
  }();
  return salt;
}

}  // namespace

const std::string& SecretSalt() { return *Salt(); }
void UseSecretSalt(std::string salt) { *Salt() = std::move(salt); }

absl::StatusOr<JobSecret> JobSecret::Create(absl::string_view secret) {
  SHARDD_RETURN_IF_ERROR(CheckJobSecret(secret));
  if (SecretSalt().empty()) {
    return absl::InternalError("job secret: the machine gives no random bytes");
  }
  JobSecret result;
  result.secret_ = std::string(secret);
  SHARDD_ASSIGN_OR_RETURN(result.digest_, Mac(SecretSalt(), secret));
  return result;
}

absl::StatusOr<std::string> JobSecret::LinkKey(absl::string_view job) const {
  if (secret_.empty()) {
    return std::string();
  }
  SHARDD_ASSIGN_OR_RETURN(const SecretDigest key, Mac(secret_, absl::StrCat("shardd link of job ", job)));
  return std::string(Bytes(key));
}

bool Tenant::IsTheDaemons() const { return uid == geteuid() && !secret.has_value(); }

bool Tenant::Admits(const Tenant& caller) const {
  if (uid != caller.uid || !secret.has_value()) {
    return uid == caller.uid;
  }
  return caller.secret.has_value() && IsSame(Bytes(*secret), Bytes(*caller.secret));
}

absl::Status SecretRefused(absl::string_view operation, const Tenant& caller) {
  return absl::PermissionDeniedError(absl::StrCat(
      operation, ": the job has a secret, and ", caller.secret.has_value() ? "another one was given" : "none was given",
      "; give the one that the job was opened with in SHARDD_JOB_SECRET or SHARDD_JOB_SECRET_FILE"));
}

std::string MakeLinkProof(const std::string& link_key, absl::string_view token, int from, int to) {
  if (link_key.empty()) {
    return "";
  }
  const absl::StatusOr<SecretDigest> proof = Mac(link_key, absl::StrCat(token, " ", from, " ", to));
  return proof.ok() ? std::string(Bytes(*proof)) : "";
}

bool IsLinkProof(absl::string_view proof, const std::string& link_key, absl::string_view token, int from, int to) {
  const std::string want = MakeLinkProof(link_key, token, from, to);
  return want.empty() == link_key.empty() && IsSame(proof, want);
}

}  // namespace shardd
