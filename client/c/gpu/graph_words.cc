#include "client/c/gpu/graph_words.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/deadline.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// Of the host for the GPU: it looks for so long without sleeping, which takes ten times of what it waits for.
constexpr absl::Duration kSpin = absl::Microseconds(200);
constexpr absl::Duration kPoll = absl::Microseconds(20);

absl::Status Until(const std::function<bool()>& come, const std::function<absl::Status()>& go_on) {
  const Deadline spins = Deadline::In(kSpin);
  while (!come()) {
    SHARDD_RETURN_IF_ERROR(go_on());
    if (!spins.HasPassed()) {
      sched_yield();
    } else {
      absl::SleepFor(kPoll);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GraphWords>> GraphWords::Make(const CudaDriver& driver) {
  auto words = absl::WrapUnique(new GraphWords(driver));
  void* const memory = mmap(nullptr, sizeof(Word) * kWords, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("begin_graph: memory for its words: ", std::strerror(errno)));
  }
  // A child of the process has no driver, and must not copy what a GPU writes.
  (void)madvise(memory, sizeof(Word) * kWords, MADV_DONTFORK);
  words->words_ = static_cast<Word*>(memory);
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->MemHostRegister(memory, sizeof(Word) * kWords,
                                           CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
                   "cuMemHostRegister", "a graph's words"));
  words->registered_ = true;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->MemHostGetDevicePointer(&words->address_, memory, 0),
                                      "cuMemHostGetDevicePointer", "a graph's words"));
  return words;
}

GraphWords::~GraphWords() {
  if (leaked_ || words_ == nullptr) return;
  if (registered_) (void)driver_->MemHostUnregister(words_);
  (void)munmap(words_, sizeof(Word) * kWords);
}

absl::StatusOr<int> GraphWords::Take() {
  const int word = used_.load(std::memory_order_relaxed);
  if (word == kWords) {
    return absl::ResourceExhaustedError(absl::StrCat("the graph meets the daemon too often (got more than ", kWords,
                                                     " gradient slots, submissions and ends of backwards); "
                                                     "capture fewer passes in one"));
  }
  used_.store(word + 1, std::memory_order_release);
  return word;
}

absl::StatusOr<int> GraphWords::AddWait(CUstream stream) {
  SHARDD_ASSIGN_OR_RETURN(const int word, Take());
  SHARDD_RETURN_IF_ERROR(driver_.Check(driver_->StreamWaitValue64(stream, AddressOf(word), 1, CU_STREAM_WAIT_VALUE_GEQ),
                                       "cuStreamWaitValue64", "the captured stream"));
  SHARDD_RETURN_IF_ERROR(
      driver_.Check(driver_->StreamWriteValue64(stream, AddressOf(word), 0, CU_STREAM_WRITE_VALUE_DEFAULT),
                    "cuStreamWriteValue64", "the captured stream"));
  return word;
}

absl::StatusOr<int> GraphWords::AddSignal(CUstream stream) {
  SHARDD_ASSIGN_OR_RETURN(const int word, Take());
  SHARDD_RETURN_IF_ERROR(
      driver_.Check(driver_->StreamWriteValue64(stream, AddressOf(word), 1, CU_STREAM_WRITE_VALUE_DEFAULT),
                    "cuStreamWriteValue64", "the captured stream"));
  return word;
}

absl::Status GraphWords::Release(int wait, const std::function<absl::Status()>& go_on) {
  Word& word = words_[wait];
  SHARDD_RETURN_IF_ERROR(Until([&word] { return word.load(std::memory_order_acquire) == 0; }, go_on));
  word.store(1, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status GraphWords::Await(int signal, const std::function<absl::Status()>& go_on) {
  Word& word = words_[signal];
  SHARDD_RETURN_IF_ERROR(Until([&word] { return word.load(std::memory_order_acquire) != 0; }, go_on));
  word.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

bool GraphWords::idle() const {
  const int used = used_.load(std::memory_order_acquire);
  return std::all_of(words_, words_ + used, [](const Word& word) { return word.load(std::memory_order_acquire) == 0; });
}

void GraphWords::End() {
  const int used = used_.load(std::memory_order_acquire);
  for (int word = 0; word < used; ++word) words_[word].store(1, std::memory_order_release);
}

}  // namespace shardd
