#include "server/metrics/http/tls_contexts.h"

#include <openssl/err.h>
#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// Changes whenever a file does.
std::string StateOf(const TlsFiles& files) {
  std::string state;
  for (const std::string* file : {&files.certificate, &files.key, &files.ca}) {
    struct stat info = {};
    if (!file->empty()) (void)stat(file->c_str(), &info);
    absl::StrAppend(&state, info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec, " ");
  }
  return state;
}

absl::Status Refuse(const char* what, const std::string& file) {
  char reason[256] = "unknown";
  if (const unsigned long error = ERR_get_error(); error != 0) ERR_error_string_n(error, reason, sizeof(reason));
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrCat("TLS: ", what, " cannot be used (got \"", file, "\": ", reason, ", want a PEM file)"));
}

absl::StatusOr<std::shared_ptr<SSL_CTX>> Load(const TlsFiles& files) {
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (context == nullptr || SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION) != 1) {
    return absl::InternalError("TLS: the cryptography library makes no context");
  }
  if (SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) != 1) {
    return Refuse("certificate", files.certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return Refuse("key", files.key);
  }
  if (!files.ca.empty()) {
    if (SSL_CTX_load_verify_locations(context.get(), files.ca.c_str(), nullptr) != 1) {
      return Refuse("authority", files.ca);
    }
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
  // Resumed sessions would be of the certificate before.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  return context;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsContexts>> TlsContexts::Create(TlsFiles files) {
  auto created = std::unique_ptr<TlsContexts>(new TlsContexts(std::move(files)));
  absl::MutexLock lock(&created->mutex_);
  created->state_ = StateOf(created->files_);
  SHARDD_ASSIGN_OR_RETURN(created->context_, Load(created->files_));
  return created;
}

std::shared_ptr<SSL_CTX> TlsContexts::Get() {
  absl::MutexLock lock(&mutex_);
  if (std::string state = StateOf(files_); state != state_) {
    state_ = std::move(state);
    absl::StatusOr<std::shared_ptr<SSL_CTX>> loaded = Load(files_);
    if (loaded.ok()) {
      context_ = *std::move(loaded);
    } else {
      LogWarning(absl::StrCat(loaded.status().message(), "; the one before stays in use"));
    }
  }
  return context_;
}

}  // namespace shardd
