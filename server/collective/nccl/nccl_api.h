#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_API_H_

// The part of NCCL's API that shardd uses, declared here instead of taken from nccl.h, like the driver's
// (common/cuda/driver_api.h): every build has it, and tests run everywhere on a fake library. The ABI is that of NCCL
// 2.28; tests/server/collective/nccl/nccl_abi_test.cc compares it with nccl.h if there is one. NVIDIA documents each
// function under `nccl` + its name here.

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
inline constexpr DataType kInt8 = 0;
inline constexpr DataType kFloat32 = 7;
using RedOp = int;
inline constexpr RedOp kSum = 0;

using Comm = struct CommOpaque*;
using Window = struct WindowOpaque*;  // of one member; also null after a registration that finds no symmetric memory
using Stream = void*;                 // a CUstream

struct UniqueId {
  char internal[128];
};

inline constexpr int kUndefined = INT_MIN;  // of a config's number: the library's default
// Bits for Config::cta_policy, of which libraries before 2.31 take at most one: use as few of a GPU's multiprocessors
// as suffice; use none if copy engines can do the work.
inline constexpr int kCtaPolicyEfficiency = 1;
inline constexpr int kCtaPolicyZero = 2;
inline constexpr int kPoliciesTogetherVersion = 23100;
// Window flag: every member's buffers are at the same offset of the window. A window's start is a multiple of this many
// bytes.
inline constexpr int kWinCollSymmetric = 1;
inline constexpr size_t kWinAlignmentBytes = 4096;

// The beginning of ncclConfig_t as of 2.27: the library fills in later fields by `size` and `version`.
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

// X(name, (parameters)): every function returns nccl::Result except GetErrorString and GetLastError.
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
  X(Send, (const void* send, size_t count, nccl::DataType dtype, int peer, nccl::Comm comm, nccl::Stream stream))     \
  X(Recv, (void* receive, size_t count, nccl::DataType dtype, int peer, nccl::Comm comm, nccl::Stream stream))        \
  X(ReduceScatter, (const void* send, void* receive, size_t receive_count, nccl::DataType dtype, nccl::RedOp op,      \
                    nccl::Comm comm, nccl::Stream stream))                                                            \
  X(GroupStart, ())                                                                                                   \
  X(GroupEnd, ())

// Likewise; null if the library lacks either, which only costs windows.
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
