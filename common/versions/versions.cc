#include "common/versions/versions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd {

std::string VersionRange::Text() const {
  return oldest == newest ? absl::StrCat(oldest) : absl::StrCat(oldest, " to ", newest);
}

absl::StatusOr<int> CommonVersion(absl::string_view what, const Speaker& mine, const Speaker& theirs) {
  if (theirs.range.newest < theirs.range.oldest) {
    return absl::InvalidArgumentError(
        absl::StrCat("what ", theirs.name, " says is no range of ", what, "s (got ", theirs.range.Text(), ")"));
  }
  const int common = std::min(mine.range.newest, theirs.range.newest);
  if (mine.range.Has(common) && theirs.range.Has(common)) {
    return common;
  }
  const bool mine_is_older = mine.range.newest < theirs.range.oldest;
  return absl::FailedPreconditionError(absl::StrCat(mine.name, " and ", theirs.name, " have no common ", what, " (got ",
                                                    theirs.range.Text(), ", want ", mine.range.Text(), "); upgrade ",
                                                    mine_is_older ? mine.name : theirs.name));
}

absl::Status CheckFormat(absl::string_view what, int format, VersionRange reads) {
  if (reads.Has(format)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(what, ": this version of shardd does not read its format (got ",
                                                    format, ", want ", reads.Text(), "); start ",
                                                    format > reads.newest ? "a newer" : "an older", " one"));
}

}  // namespace shardd
