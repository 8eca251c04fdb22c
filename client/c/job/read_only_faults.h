#ifndef SHARDD_CLIENT_C_JOB_READ_ONLY_FAULTS_H_
#define SHARDD_CLIENT_C_JOB_READ_ONLY_FAULTS_H_

// Names what a program has stored into where it may only read. Such a store ends the process, as any store into
// read-only memory does; a line on standard error says before which parameter it was.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace shardd {

// The texts of one job's read-only memory, prepared for a signal handler. Immutable once it is watched.
class ReadOnlyTexts {
 public:
  // How the line begins and ends around the name: `shardd: write parameter "`, `": it is read-only here\n`.
  struct Kind {
    std::string before;
    std::string after;
  };
  // Takes the kind's number of all that follow with `kind`.
  int AddKind(Kind kind);
  void Add(const char* begin, int64_t size_bytes, int kind, std::string_view name);
  // REQUIRES: called once, after all Add and before Find.
  void Sort();

  // The parts of the line about a store at `address`; all are empty if it is nobody's. Async-signal-safe.
  std::array<std::string_view, 3> Find(const char* address) const;

 private:
  struct Piece {
    const char* begin;
    const char* end;
    uint32_t name_at;
    uint32_t name_size;
    int kind;
  };
  std::vector<Kind> kinds_;
  std::vector<Piece> pieces_;  // ascending, and disjoint
  std::string names_;
};

// The process has one handler of SIGSEGV, installed with the first Watch. It writes the prepared text and then calls
// the handler that was there before: it takes no lock, allocates nothing and waits for nobody, so any thread may fault
// wherever it is. One that is installed later (faulthandler) and raises the signal anew comes before it, and is heard
// first.
class ReadOnlyFaults {
 public:
  static constexpr int kMaxJobs = 16;
  // Returns RESOURCE_EXHAUSTED beyond kMaxJobs. `texts` stay until they are forgotten. Thread-safe, as is Forget.
  static absl::Status Watch(const ReadOnlyTexts* texts);
  // Returns true if no handler can read `texts` any more, which it waits for, up to a second; false: they have to stay
  // as they are, because one is at its text and the process ends.
  static bool Forget(const ReadOnlyTexts* texts);
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_JOB_READ_ONLY_FAULTS_H_
