#ifndef SHARDD_SERVER_METRICS_HTTP_TLS_CONTEXTS_H_
#define SHARDD_SERVER_METRICS_HTTP_TLS_CONTEXTS_H_

#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics/http/listen_address.h"

namespace shardd {

// Contexts of these files as they are when a client comes: a certificate that is renewed counts from then on, and one
// that cannot be used (half written, of another key) leaves the one before in use. Thread-safe.
class TlsContexts {
 public:
  // INVALID_ARGUMENT, naming the file: certificate, key or authority cannot be used.
  static absl::StatusOr<std::unique_ptr<TlsContexts>> Create(TlsFiles files);

  // TLS 1.2 or newer.
  std::shared_ptr<SSL_CTX> Get() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit TlsContexts(TlsFiles files) : files_(std::move(files)) {}

  const TlsFiles files_;
  absl::Mutex mutex_;
  std::string state_ ABSL_GUARDED_BY(mutex_);  // of the files, when they were last looked at
  std::shared_ptr<SSL_CTX> context_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_TLS_CONTEXTS_H_
