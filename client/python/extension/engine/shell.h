#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_SHELL_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_SHELL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/fsdp/shell.h"

namespace shardd::python {

class Engine;
class Unit;

// What an engine's groups and passes ask of its job: in the order of the current stream, and without the GIL where that
// may wait. Owns which unit each group belongs to. Raises where the job is closed; the GIL may be held or not, and is
// held for passes.
class EngineShell final : public fsdp::Shell, public fsdp::PassShell {
 public:
  explicit EngineShell(Engine& engine) : engine_(engine) {}
  void Add(Unit& unit);
  void Remove(const Unit& unit);

  Status Unshard(int32_t group, shardd_phase phase) override;
  Status WaitUnshard(int32_t group) override;
  Status Reshard(int32_t group) override;
  Status WaitGradientSlot(int32_t group) override;
  Status SubmitGradients(int32_t group, const uint8_t* present, const uint8_t* fresh) override;

  bool InsidePass() override;
  Status EnterPass(bool stepped, const std::string& state) override;
  Status LeavePass() override;
  Status StopReading() override;
  Status ResumeReading() override;
  Status ReshardAll() override;
  void StepCommitted() override;

 private:
  Engine& engine_;
  std::vector<Unit*> units_;  // by group; null: the unit is gone
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_SHELL_H_
