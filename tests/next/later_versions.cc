// A release that speaks and reads nothing of this one.

#include "common/versions/versions.h"

namespace shardd {

const VersionRange kProtocolVersions = {15, 16};
const VersionRange kCustodyVersions = {3, 3};
const VersionRange kCustodyFormats = {3, 3};
const VersionRange kJournalFormats = {3, 3};
const VersionRange kTakeUpFormats = {4, 4};

}  // namespace shardd
