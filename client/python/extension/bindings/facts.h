#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_FACTS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_FACTS_H_

// What Python is told of a job, as dictionaries. The GIL is held.

#include <pybind11/pybind11.h>

#include "client/python/extension/engine/engine.h"

namespace shardd::python {

pybind11::dict InfoDict(Engine& engine);
pybind11::dict ParamDict(Engine& engine, int param);
pybind11::dict FlatParamDict(Engine& engine, int flat_param);
// Of the shard of a rank: tuples (parameter, first, numel, offset_numel), and elements of padding.
pybind11::tuple ShardPieces(Engine& engine, int flat_param, int rank);
// Of the parameter's elements, which this rank holds, and whether a rank of an earlier replica holds the same.
pybind11::dict RangeDict(Engine& engine, int param);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_BINDINGS_FACTS_H_
