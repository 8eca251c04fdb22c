#include "common/process/kept_write.h"

namespace shardd {

void AtKeptWrite() {}

}  // namespace shardd
