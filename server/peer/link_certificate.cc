#include "server/peer/link_certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <ctime>
#include <fstream>
#include <memory>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bio BioOf(const std::string& pem) { return {BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free}; }

// The first certificate of the file: the daemon's own, before those of authorities. Null: there is none.
Certificate CertificateOf(const std::string& pem) {
  return {PEM_read_bio_X509(BioOf(pem).get(), nullptr, nullptr, nullptr), X509_free};
}

Certificate CertificateIn(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  Certificate certificate = CertificateOf(text.str());
  ERR_clear_error();
  return certificate;
}

absl::Time TimeOf(const ASN1_TIME* time, absl::Time otherwise) {
  std::tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? absl::FromTM(parts, absl::UTCTimeZone()) : otherwise;
}

}  // namespace

absl::Status CheckKeyOfCertificate(const std::string& certificate, const std::string& key) {
  const Certificate parsed = CertificateOf(certificate);
  const Key private_key = {PEM_read_bio_PrivateKey(BioOf(key).get(), nullptr, nullptr, nullptr), EVP_PKEY_free};
  const bool match =
      parsed != nullptr && private_key != nullptr && X509_check_private_key(parsed.get(), private_key.get()) == 1;
  ERR_clear_error();
  if (match) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(parsed == nullptr        ? "the file of --peer_cert has no certificate"
                                : private_key == nullptr ? "the file of --peer_key has no key without a password"
                                                         : "--peer_key is not the key of --peer_cert");
}

std::string CertificateProblem(const std::string& path, absl::Time now) {
  const Certificate certificate = CertificateIn(path);
  if (certificate == nullptr) {
    return "";
  }
  const absl::Time begins = TimeOf(X509_get0_notBefore(certificate.get()), absl::InfinitePast());
  const absl::Time ends = TimeOf(X509_get0_notAfter(certificate.get()), absl::InfiniteFuture());
  if (begins <= now && now <= ends) {
    return "";
  }
  return absl::StrCat("this daemon's own certificate \"", absl::CHexEscape(path),
                      now > ends ? "\" has expired (notAfter " : "\" is not valid yet (notBefore ",
                      absl::FormatTime(absl::RFC3339_sec, now > ends ? ends : begins, absl::UTCTimeZone()),
                      "); put a new one into its place");
}

absl::Time CertificateExpiry(const std::string& path) {
  const Certificate certificate = CertificateIn(path);
  return certificate == nullptr ? absl::InfiniteFuture()
                                : TimeOf(X509_get0_notAfter(certificate.get()), absl::InfiniteFuture());
}

}  // namespace shardd
