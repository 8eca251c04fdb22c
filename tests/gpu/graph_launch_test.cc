// How much of a CUDA graph a launch hands to the GPU before its first node has run: beyond that cuGraphLaunch keeps its
// caller until the GPU has come far enough. It is why the library launches from a thread of its own (client/c).

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "tests/gpu/gpu.h"

namespace shardd::cuda {
namespace {

enum class Node { kHostFunction, kCopy, kMemoryOperation, kCopyAndHostFunction };

TEST(GraphLaunch, ReturnsOnceTheWaitAtItsBeginningEnds) {
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) GTEST_SKIP() << why;
  const CudaDriver& driver = gpu->driver();
  const CudaSlab memory = gpu->Allocate(int64_t{2} << 20);
  alignas(4096) static std::atomic<uint64_t> words[512];
  gpu->Check(driver->MemHostRegister(words, sizeof(words), CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
             "register");
  CUdeviceptr word = 0;
  gpu->Check(driver->MemHostGetDevicePointer(&word, words, 0), "address");
  CUcontext context = nullptr;
  gpu->Check(driver->DevicePrimaryCtxRetain(&context, 0), "context");
  const CUstream stream = gpu->NewStream();
  const auto at = reinterpret_cast<CUdeviceptr>(memory.data());
  std::printf(
      "| nodes of a graph behind a wait | cuGraphLaunch returns at once up to | keeps its caller from "
      "|\n|---|---|---|\n");
  for (const auto& [node, name] : {std::pair{Node::kHostFunction, "host functions"},
                                   {Node::kCopy, "copies within the GPU"},
                                   {Node::kMemoryOperation, "writes of 64-bit words"},
                                   {Node::kCopyAndHostFunction, "copies and host functions in turns"}}) {
    int returned = 0, kept = 0;
    for (int count = 32; count <= 8192 && kept == 0; count *= 2) {
      gpu->Check(driver->StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
      gpu->Check(driver->StreamWaitValue64(stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ), "wait");
      for (int i = 0; i < count; ++i) {
        if (node == Node::kMemoryOperation) {
          gpu->Check(driver->StreamWriteValue64(stream, word + 256, 1, CU_STREAM_WRITE_VALUE_DEFAULT), "write");
        } else if (node == Node::kCopy || (node == Node::kCopyAndHostFunction && i % 2 == 0)) {
          gpu->Check(driver->MemcpyAsync(at, at + 4096, 64, stream), "copy");
        } else {
          gpu->Check(driver->LaunchHostFunc(
                         stream, [](void*) {}, nullptr),
                     "host function");
        }
      }
      CUgraph graph = nullptr;
      CUgraphExec exec = nullptr;
      gpu->Check(driver->StreamEndCapture(stream, &graph), "end of the capture");
      gpu->Check(driver->GraphInstantiateWithFlags(&exec, graph, 0), "instantiate");
      words[0] = 0;
      std::promise<CUresult> result;
      std::future<CUresult> launched = result.get_future();
      std::thread thread([&] {
        (void)driver->CtxSetCurrent(context);
        result.set_value(driver->GraphLaunch(exec, stream));
      });
      (launched.wait_for(std::chrono::milliseconds(300)) == std::future_status::ready ? returned : kept) = count;
      words[0] = 1;
      EXPECT_EQ(launched.get(), CUDA_SUCCESS);
      thread.join();
      gpu->Check(driver->StreamSynchronize(stream), "synchronise");
      gpu->Check(driver->GraphExecDestroy(exec), "destroy");
      gpu->Check(driver->GraphDestroy(graph), "destroy");
    }
    std::printf("| %s | %d | %s |\n", name, returned, kept == 0 ? "not by 8192" : std::to_string(kept).c_str());
  }
  gpu->Check(driver->MemHostUnregister(words), "unregister");
}

}  // namespace
}  // namespace shardd::cuda
