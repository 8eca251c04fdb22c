#ifndef SHARDD_CLIENT_TORCH_TORCH_VERSIONS_H_
#define SHARDD_CLIENT_TORCH_TORCH_VERSIONS_H_

// What differs in C++ between the versions of torch that are served, by what torch's headers declare. In Python it is
// client/python/src/shardd/torch/_process/torch_versions.py.
//
// | what                                  | 2.10                             | later                              |
// |---------------------------------------|----------------------------------|------------------------------------|
// | autograd owns nodes by                | std::shared_ptr                  | c10::intrusive_ptr                 |
// | a storage that raises when it is read | does so for good: a private bool | clear_data_ptr_access_error_msg_() |
// | the extension asks for CUDA's stream  | torch.cuda.Stream, in Python     | c10::Stream::native_handle()       |

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace shardd {

using NodePtr = decltype(torch::autograd::Edge::function);

namespace internal {

inline constexpr bool kNodesAreShared = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

}  // namespace internal

template <typename Node, typename... Args>
NodePtr MakeNode(Args&&... args) {
  if constexpr (internal::kNodesAreShared) {
    torch::autograd::Node* const node = new Node(std::forward<Args>(args)...);
    return NodePtr(node, [](auto* of) { deleteNode(of); });  // which torch has only then
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

// `node` accumulates the gradient of the leaf `tensor`, and does so as long as the caller owns it.
template <typename Ptr = NodePtr>
void SetGradAccumulator(const at::Tensor& tensor, const Ptr& node) {
  if constexpr (internal::kNodesAreShared) {
    torch::autograd::impl::set_grad_accumulator(tensor, node);
  } else {
    torch::autograd::impl::set_grad_accumulator(tensor, c10::weak_intrusive_ptr<typename Ptr::element_type>(node));
  }
}

// The storage, which raised where it was used, has memory from here on.
void PointStorage(c10::StorageImpl* storage, at::DataPtr data);

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_TORCH_VERSIONS_H_
