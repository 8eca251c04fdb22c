#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_VALUES_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_VALUES_H_

// Values into an engine's job and out of it. `param`: by the daemon's numbers. All need the GIL, and let it go while
// they copy or wait.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "client/python/extension/engine/engine.h"

namespace shardd::python {

// Gives the elements of `rows` to the job, from element `first` of the parameter on. Before version 1, in a write, and
// in full parameters that were entered with writeback.
void Write(Engine& engine, int param, const at::Tensor& rows, int64_t first);
// The same for its gradient, for fp32 state of the daemon's optimizer, and for the number of updates that it has made.
void WriteGradient(Engine& engine, int param, const at::Tensor& rows, int64_t first);
void WriteOptimizerState(Engine& engine, int param, int state, const at::Tensor& rows, int64_t first);
void WriteUpdateCount(Engine& engine, int param, int64_t count);
// What was written becomes everybody's.
void Commit(Engine& engine);

// The whole parameter as stored, or its gradient in fp32, into `out`, which is contiguous and has its size and dtype.
// False: this rank is not given it, or it has no gradient. REQUIRES: full parameters are entered.
bool CopyFullParameter(Engine& engine, int param, at::Tensor out);
bool CopyFullGradient(Engine& engine, int param, at::Tensor out);
// Elements [first, first + out.numel()) of the parameter as stored, at any time: that they do not change meanwhile is
// the caller's to arrange. False: the job's memory is not there. REQUIRES: out is contiguous and of the stored dtype.
bool CopyStored(Engine& engine, int param, int64_t first, at::Tensor out);

// fp32 state of the whole parameter where it lies, one-dimensional: valid while attached, and not to be written. None:
// the job has no such state, or this process has stored values over it.
pybind11::object StoredState(Engine& engine, int param, int state);
// `local` (this rank's rows of the parameter, alone in its storage) lies in the job's memory for state `state` from now
// on; `copy_in`: with the values it has. RESOURCE_EXHAUSTED: the job has no such state.
void AdoptState(Engine& engine, int param, int state, const at::Tensor& local, bool copy_in, bool whole);
// The daemon's optimizer has these parameters and no others.
void SetUpdated(Engine& engine, const std::vector<int>& params);

// What `.grad` says is what the job has, before it is read: gradients that the program gave or dropped.
void SettleGradients(Engine& engine);
// `.grad` shows what the job has, because it was written there.
void TakeGradient(Engine& engine, int param);
// This rank has submitted a gradient of it for the next step, whether or not it shows one.
bool HasGradient(Engine& engine, int param);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_VALUES_H_
