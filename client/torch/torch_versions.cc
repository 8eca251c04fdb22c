#include "client/torch/torch_versions.h"

#include <optional>
#include <utility>

namespace shardd {
namespace {

// Gives a name to a private member, as explicit instantiations may.
template <auto kThrows>
struct StorageThrows {
  friend bool& Throws(c10::StorageImpl& storage) { return storage.*kThrows; }
};
template struct StorageThrows<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& Throws(c10::StorageImpl& storage);

template <typename Storage>
void Point(Storage& storage, at::DataPtr data) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.set_data_ptr_noswap(std::move(data));
    storage.clear_data_ptr_access_error_msg_();
  } else {
    Throws(storage) = false;
    storage.get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
    storage.set_data_ptr_noswap(std::move(data));  // and looks at the bool
  }
}

}  // namespace

void PointStorage(c10::StorageImpl* storage, at::DataPtr data) { Point(*storage, std::move(data)); }

}  // namespace shardd
