// What the next release might speak and read, linked in the place of this build's: all else of a program is the same.

#include "common/versions/versions.h"

namespace shardd {

const VersionRange kProtocolVersions = {13, 14};
const VersionRange kCustodyVersions = {1, 2};
const VersionRange kCustodyFormats = {1, 2};
const VersionRange kJournalFormats = {1, 2};
const VersionRange kTakeUpFormats = {1, 3};

}  // namespace shardd
