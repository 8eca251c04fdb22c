#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_

// Which functions of NCCL shardd calls. Types, constants and signatures are those of nccl.h, of the oldest version that
// is taken; the functions are found at run time (nccl_library.h), so nothing of NCCL is linked, and tests run
// everywhere on a fake library that is compiled against the same header (tests/fakes/nccl). nccl.h includes CUDA's
// runtime and costs a compiler 0.2 s: few files include this one.

#include <nccl.h>

#include <cstddef>
#include <cstdint>

namespace shardd::nccl {

inline constexpr int kLeastVersion = 22800;  // as ncclGetVersion counts: 10000 * major + 100 * minor + patch
// Libraries before take at most one bit of ncclConfig_t::CTAPolicy.
inline constexpr int kPoliciesTogetherVersion = 23100;
// A library knows the fields of ncclConfig_t that its own header has, by `size` and `version`: one that is older than
// ours must have them all.
static_assert(NCCL_VERSION_CODE >= kLeastVersion && NCCL_VERSION_CODE < kLeastVersion + 100,
              "compile with the nccl.h of the oldest NCCL that is taken: deploy/nvidia_headers.sh installs it");

// X(name): `nccl` + name.
// clang-format off
#define SHARDD_NCCL_FUNCTIONS(X)                                                                                \
  X(GetVersion) X(GetErrorString) X(GetLastError) X(GetUniqueId) X(CommInitRankConfig) X(CommGetAsyncError)     \
  X(CommDestroy) X(CommAbort) X(Reduce) X(AllReduce) X(Send) X(Recv) X(ReduceScatter) X(GroupStart) X(GroupEnd)
// clang-format on

// Likewise; null if the library lacks either, which only costs windows.
#define SHARDD_NCCL_WINDOW_FUNCTIONS(X) X(CommWindowRegister) X(CommWindowDeregister)

struct Table {
#define SHARDD_NCCL_MEMBER(name) decltype(&nccl##name) name = nullptr;
  SHARDD_NCCL_FUNCTIONS(SHARDD_NCCL_MEMBER)
  SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_NCCL_MEMBER)
#undef SHARDD_NCCL_MEMBER
};

}  // namespace shardd::nccl

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_
