#include "common/versions/versions.h"

namespace shardd {

const VersionRange kProtocolVersions = {13, 13};
const VersionRange kCustodyVersions = {1, 1};
const VersionRange kCustodyFormats = {1, 1};
const VersionRange kJournalFormats = {1, 1};
const VersionRange kTakeUpFormats = {1, 2};

}  // namespace shardd
