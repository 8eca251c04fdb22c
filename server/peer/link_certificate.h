#ifndef SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_
#define SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

// UNAVAILABLE: no certificate, no key, or not the key of that certificate. Both are texts of PEM files.
absl::Status CheckKeyOfCertificate(const std::string& certificate, const std::string& key);

// Why nobody takes the certificate in the PEM file `path` at `now`: that it has expired, or is not valid yet, with the
// time. Empty: it is valid, or cannot be read. Reads the file each time.
std::string CertificateProblem(const std::string& path, absl::Time now);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_
