#include "server/job/writes/value_commit.h"

#include <algorithm>

namespace shardd {

bool ValueCommit::any_asked() const { return std::find(asked_.begin(), asked_.end(), true) != asked_.end(); }

void ValueCommit::Committed() {
  asked_.assign(asked_.size(), false);
  said_ = false;
}

}  // namespace shardd
