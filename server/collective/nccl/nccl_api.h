#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_

// The part of NCCL's API that shardd uses, declared here rather than taken from nccl.h, as the driver's is
// (common/cuda/driver_api.h): every build has it, and its tests run everywhere on a fake library. The ABI is that of
// NCCL 2.28; tests/server/collective/nccl_abi_test.cc compares it with nccl.h where there is one. What a function does:
// NVIDIA's documentation of the function `nccl` + its name here.

#include <climits>
#include <cstddef>
#include <cstdint>

namespace shardd::nccl {

inline constexpr int kLeastVersion = 22800;  // as ncclGetVersion counts: 10000 * major + 100 * minor + patch

using Result = int;  // an enum of that size
inline constexpr Result kSuccess = 0;
inline constexpr Result kUnhandledCudaError = 1;
inline constexpr Result kSystemError = 2;
inline constexpr Result kInternalError = 3;
inline constexpr Result kInvalidArgument = 4;
inline constexpr Result kInvalidUsage = 5;
inline constexpr Result kRemoteError = 6;
inline constexpr Result kInProgress = 7;

using DataType = int;
inline constexpr DataType kFloat32 = 7;
using RedOp = int;
inline constexpr RedOp kSum = 0;

using Comm = struct CommOpaque*;
using Window = struct WindowOpaque*;  // a member's; null also where a registration succeeds: no symmetric memory here
using Stream = void*;                 // a CUstream

struct UniqueId {
  char internal[128];
};

inline constexpr int kUndefined = INT_MIN;  // of a config's numbers: the library's default
// For Config::cta_policy; bits, of which libraries before 2.31 take one at most. How many of a GPU's multiprocessors
// NCCL's work takes: as few as do, none where copy engines can do it.
inline constexpr int kCtaPolicyEfficiency = 1;
inline constexpr int kCtaPolicyZero = 2;
inline constexpr int kPoliciesTogetherVersion = 23100;
// Flags of a window: every member's buffers lie at the same offset of it. A window's start is a multiple of that many
// bytes.
inline constexpr int kWinCollSymmetric = 1;
inline constexpr size_t kWinAlignmentBytes = 4096;

// The front part of ncclConfig_t as it was in 2.27: the library fills in what came later by `size` and `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 22700;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
};

// X(name, (parameters)): every function returns nccl::Result but GetErrorString and GetLastError.
#define SHARDD_NCCL_FUNCTIONS(X)                                                                                      \
  X(GetVersion, (int* version))                                                                                       \
  X(GetUniqueId, (nccl::UniqueId * id))                                                                               \
  X(CommInitRankConfig, (nccl::Comm * comm, int ranks, nccl::UniqueId id, int rank, nccl::Config* config))            \
  X(CommGetAsyncError, (nccl::Comm comm, nccl::Result * result))                                                      \
  X(CommDestroy, (nccl::Comm comm))                                                                                   \
  X(CommAbort, (nccl::Comm comm))                                                                                     \
  X(Reduce, (const void* send, void* receive, size_t count, nccl::DataType dtype, nccl::RedOp op, int root,           \
             nccl::Comm comm, nccl::Stream stream))                                                                   \
  X(AllReduce, (const void* send, void* receive, size_t count, nccl::DataType dtype, nccl::RedOp op, nccl::Comm comm, \
                nccl::Stream stream))                                                                                 \
  X(ReduceScatter, (const void* send, void* receive, size_t receive_count, nccl::DataType dtype, nccl::RedOp op,      \
                    nccl::Comm comm, nccl::Stream stream))                                                            \
  X(GroupStart, ())                                                                                                   \
  X(GroupEnd, ())

// Likewise; null where the library has not both, which costs windows alone.
#define SHARDD_NCCL_WINDOW_FUNCTIONS(X)                                                                      \
  X(CommWindowRegister, (nccl::Comm comm, void* buffer, size_t size_bytes, nccl::Window* window, int flags)) \
  X(CommWindowDeregister, (nccl::Comm comm, nccl::Window window))

struct Table {
#define SHARDD_NCCL_MEMBER(name, parameters) Result(*name) parameters = nullptr;
  SHARDD_NCCL_FUNCTIONS(SHARDD_NCCL_MEMBER)
  SHARDD_NCCL_WINDOW_FUNCTIONS(SHARDD_NCCL_MEMBER)
#undef SHARDD_NCCL_MEMBER
  const char* (*GetErrorString)(Result result) = nullptr;
  const char* (*GetLastError)(Comm comm) = nullptr;
};

}  // namespace shardd::nccl

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_
