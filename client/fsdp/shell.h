#ifndef SHARDD_CLIENT_FSDP_SHELL_H_
#define SHARDD_CLIENT_FSDP_SHELL_H_

#include <cstdint>
#include <string>

#include "client/cpp/shardd.h"

namespace shardd::fsdp {

// What this folder asks of the job, made by whoever knows the framework: there a wait lets the interpreter's lock go,
// or a call is put into the order of a GPU's stream. Each is the function of the same name in client/c/shardd.h.
//
// A call fails with a Status, or throws what the framework throws. Either way what the caller knows stays as it was,
// and the attachment is over or the backward is abandoned.
class Shell {
 public:
  virtual ~Shell() = default;
  virtual Status Unshard(int32_t group, shardd_phase phase) = 0;
  virtual Status WaitUnshard(int32_t group) = 0;
  virtual Status Reshard(int32_t group) = 0;
  virtual Status WaitGradientSlot(int32_t group) = 0;
  // The masks have a bit for each parameter of the group, and are valid during the call.
  virtual Status SubmitGradients(int32_t group, const uint8_t* present, const uint8_t* fresh) = 0;
};

// The same, of trainers that write their parameters.
class PassShell {
 public:
  virtual ~PassShell() = default;
  virtual bool InsidePass() = 0;
  virtual Status EnterPass(bool stepped, const std::string& state) = 0;
  virtual Status LeavePass() = 0;
  virtual Status StopReading() = 0;
  virtual Status ResumeReading() = 0;
  // Gives all groups back, whoever uses them.
  virtual Status ReshardAll() = 0;
  // The pass that was entered has committed a step of the trainers' optimizer.
  virtual void StepCommitted() = 0;
};

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_SHELL_H_
