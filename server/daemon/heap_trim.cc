#include "server/daemon/heap_trim.h"

#include <malloc.h>

#include <utility>

namespace shardd {

HeapTrim::HeapTrim() : HeapTrim([] { return mallinfo2().fordblks; }, [] { malloc_trim(0); }) {}

HeapTrim::HeapTrim(std::function<size_t()> free_bytes, std::function<void()> trim)
    : free_bytes_(std::move(free_bytes)), trim_(std::move(trim)) {}

void HeapTrim::Freed() {
  if (free_bytes_() > kMostKeptBytes) {
    due_ = false;
    trim_();
    return;
  }
  due_ = true;
}

}  // namespace shardd
