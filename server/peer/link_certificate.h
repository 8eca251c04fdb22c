#ifndef SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_
#define SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardd {

// UNAVAILABLE: there is no certificate or no key, or they do not match. Both are texts of PEM files.
absl::Status CheckKeyOfCertificate(const std::string& certificate, const std::string& key);

// Why other daemons reject the certificate in the PEM file `path` at `now`: it has expired, or is not valid yet, with
// the time. Empty: it is valid, or cannot be read. Reads the file each time.
std::string CertificateProblem(const std::string& path, absl::Time now);

// When that certificate expires (notAfter); infinite future: there is none that can be read. Reads the file each time.
absl::Time CertificateExpiry(const std::string& path);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_CERTIFICATE_H_
