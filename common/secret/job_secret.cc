#include "common/secret/job_secret.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/process/environment.h"
#include "common/shm/unique_fd.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr mode_t kOthers = S_IRWXO;
constexpr mode_t kGroup = S_IRWXG;

}  // namespace

absl::Status CheckJobSecret(absl::string_view secret) {
  if (secret.size() < kLeastJobSecretBytes || secret.size() > kMostJobSecretBytes) {
    return absl::InvalidArgumentError(absl::StrCat("job secret: its length is out of range (got ", secret.size(),
                                                   " bytes, want ", kLeastJobSecretBytes, " to ", kMostJobSecretBytes,
                                                   "); make one with `openssl rand -base64 32`"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadJobSecretFile(const std::string& path) {
  const std::string what = absl::StrCat("job secret file \"", path, "\"");
  // Without O_NONBLOCK a pipe would block here.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info = {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    const int error = errno;
    const std::string text = absl::StrCat(what, ": cannot be opened (", strerror(error), ")");
    return error == EACCES || error == EPERM ? absl::PermissionDeniedError(text) : absl::NotFoundError(text);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": it is no regular file"));
  }
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, ": it belongs to another user (got uid ", info.st_uid, ", want ", geteuid(), ", or 0)"));
  }
  const mode_t refused = info.st_uid == 0 ? kOthers | S_IWGRP : kOthers | kGroup;
  if ((info.st_mode & refused) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "%s: others may read or change it (got mode %04o, want %s)", what, static_cast<unsigned>(info.st_mode & 07777U),
        info.st_uid == 0 ? "0440 at most: defaultMode of a Kubernetes secret" : "0600 at most: chmod"));
  }
  std::string secret(kMostJobSecretBytes + 2, '\0');  // with its newline, and one byte that shows it is too long
  const ssize_t size = pread(file.get(), secret.data(), secret.size(), 0);
  if (size < 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": cannot be read (", strerror(errno), ")"));
  }
  secret.resize(static_cast<size_t>(size));
  if (!secret.empty() && secret.back() == '\n') {
    secret.pop_back();
  }
  if (absl::Status status = CheckJobSecret(secret); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
  }
  return secret;
}

absl::StatusOr<std::string> ReadJobSecret() {
  const std::string secret = Environment("SHARDD_JOB_SECRET");
  if (secret.empty()) {
    const std::string path = Environment("SHARDD_JOB_SECRET_FILE");
    return path.empty() ? path : ReadJobSecretFile(path);
  }
  if (absl::Status status = CheckJobSecret(secret); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("SHARDD_JOB_SECRET: ", status.message()));
  }
  return secret;
}

}  // namespace shardd
