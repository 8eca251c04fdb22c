#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_AT_EXIT_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_AT_EXIT_H_

// Jobs that a process has at its end. Whether it needs them no more depends on its exit status, which Python's atexit
// does not know: SystemExit calls no hook, and hooks are replaced. The C library tells it to the handlers of exit().

#include <string>
#include <vector>

#include "client/python/extension/engine/engine.h"

namespace shardd::python {

// Ends `engine`, as Release, and leaves its job to exit(): where that has status 0 the job finishes, as Detach(true),
// and the files `notes` are removed; with another status it is kept, as Detach(false). Where the process
// ends without exit(), by a signal or _exit(), the daemon has lost the rank. Kept at once if the C library cannot tell
// the status. What the daemon says then is written to standard error. Raises as Release, and the job is left all the
// same. REQUIRES: the GIL is held; the interpreter is at its end, so that nothing else is registered.
void LeaveToExit(Engine& engine, std::string name, std::vector<std::string> notes);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_ENGINE_AT_EXIT_H_
