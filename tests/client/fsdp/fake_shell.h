#ifndef SHARDD_TESTS_CLIENT_FSDP_FAKE_SHELL_H_
#define SHARDD_TESTS_CLIENT_FSDP_FAKE_SHELL_H_

#include <string>
#include <utility>
#include <vector>

#include "client/fsdp/shell.h"

namespace shardd::fsdp {

// Writes down what it is asked: "unshard 0 backward", "submit 1 present=3 fresh=1".
class FakeShell final : public Shell {
 public:
  Status Unshard(int32_t group, shardd_phase phase) override {
    return Asked("unshard", group, phase == SHARDD_BACKWARD ? " backward" : " forward");
  }
  Status WaitUnshard(int32_t group) override { return Asked("wait", group); }
  Status Reshard(int32_t group) override { return Asked("reshard", group); }
  Status WaitGradientSlot(int32_t group) override { return Asked("slot", group); }
  Status SubmitGradients(int32_t group, const uint8_t* present, const uint8_t* fresh) override {
    return Asked("submit", group, " present=" + std::to_string(present[0]) + " fresh=" + std::to_string(fresh[0]));
  }
  // What was asked since the last Take.
  std::vector<std::string> Take() { return std::exchange(asked_, {}); }
  void FailAt(const std::string& what) { fails_ = what; }

 private:
  Status Asked(const std::string& what, int32_t group, const std::string& more = "") {
    asked_.push_back(what + " " + std::to_string(group) + more);
    return what == fails_ ? Status(Code::kAborted, what) : Status();
  }
  std::vector<std::string> asked_;
  std::string fails_;
};

}  // namespace shardd::fsdp

#endif  // SHARDD_TESTS_CLIENT_FSDP_FAKE_SHELL_H_
