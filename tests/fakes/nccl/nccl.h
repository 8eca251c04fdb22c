#ifndef SHARDD_TESTS_FAKES_NCCL_NCCL_H_
#define SHARDD_TESTS_FAKES_NCCL_NCCL_H_

#include "server/collective/nccl/nccl_api.h"

namespace shardd::fake_nccl {

// The functions, where they are linked into a test rather than loaded.
nccl::Table Table();

}  // namespace shardd::fake_nccl

#endif  // SHARDD_TESTS_FAKES_NCCL_NCCL_H_
