#include "tests/testing/build_paths.h"

namespace shardd::built {

const std::string kSourceDir = SHARDD_SOURCE_DIR;
const std::string kDaemon = SHARDD_BINARY_DIR "/bin/shardd";
const std::string kCtl = SHARDD_BINARY_DIR "/bin/shardctl";
const std::string kLibrary = SHARDD_BINARY_DIR "/lib/libshardd.so";
const std::string kFakesDir = SHARDD_BINARY_DIR "/fakes";

}  // namespace shardd::built
