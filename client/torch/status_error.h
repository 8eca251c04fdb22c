#ifndef SHARDD_CLIENT_TORCH_STATUS_ERROR_H_
#define SHARDD_CLIENT_TORCH_STATUS_ERROR_H_

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "client/cpp/shardd.h"

namespace shardd {

// What calls inside forward and backward throw, because torch code has no other way out. ShardedModule::Try turns it
// back into its Status.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(Status status) : std::runtime_error(status.message()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

namespace internal {

inline void ThrowIfError(Status status) {
  if (!status.ok()) {
    throw StatusError(std::move(status));
  }
}

// The other way round, for functions that return Status and call torch, which throws: `body`'s Status, that of a
// StatusError, or INTERNAL with what torch says and the `operation` in front ("copy full parameters").
template <typename Body>
Status NoThrow(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const StatusError& error) {
    return error.status();
  } catch (const c10::Error& error) {
    return Status(Code::kInternal, std::string(operation) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Status(Code::kInternal, std::string(operation) + ": " + error.what());
  }
}

}  // namespace internal
}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_STATUS_ERROR_H_
