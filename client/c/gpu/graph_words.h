#ifndef SHARDD_CLIENT_C_GPU_GRAPH_WORDS_H_
#define SHARDD_CLIENT_C_GPU_GRAPH_WORDS_H_

// The words through which one CUDA graph and the host meet, as often as it is launched. A graph's values are constants,
// so unlike a timeline's these words go back: each is 0 between launches.
//
//   wait    the GPU waits for 1, then writes 0.      The host writes 1, once it is 0 (a launch before may be there).
//   signal  the GPU writes 1.                        The host waits for 1, then writes 0.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/cuda/driver.h"

namespace shardd {

// Thread-compatible, but for End, which any thread may call.
class GraphWords {
 public:
  static constexpr int kWords = 4096;

  // Registered with `driver`, in the context that is current. REQUIRES: no stream of it is being captured.
  static absl::StatusOr<std::unique_ptr<GraphWords>> Make(const CudaDriver& driver);
  GraphWords(const GraphWords&) = delete;
  GraphWords& operator=(const GraphWords&) = delete;
  ~GraphWords();
  // The GPU may still come to them: they stay for the rest of the process.
  void Leak() { leaked_ = true; }

  // No launch is under way.
  bool idle() const;

  // Enqueue into a stream that is being captured; the word's number. RESOURCE_EXHAUSTED: they are used up.
  absl::StatusOr<int> AddWait(CUstream stream);
  absl::StatusOr<int> AddSignal(CUstream stream);

  // Of the host, and of one launch: until `go_on` says otherwise.
  absl::Status Release(int wait, const std::function<absl::Status()>& go_on);
  absl::Status Await(int signal, const std::function<absl::Status()>& go_on);
  // Lets go whatever waits. Again and again, until the stream has drained: the GPU writes 0 behind each wait.
  void End();

 private:
  using Word = std::atomic<uint64_t>;
  explicit GraphWords(const CudaDriver& driver) : driver_(driver) {}
  absl::StatusOr<int> Take();
  CUdeviceptr AddressOf(int word) const { return address_ + sizeof(Word) * static_cast<CUdeviceptr>(word); }

  const CudaDriver& driver_;
  Word* words_ = nullptr;
  CUdeviceptr address_ = 0;
  bool registered_ = false;
  bool leaked_ = false;
  std::atomic<int> used_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_GPU_GRAPH_WORDS_H_
