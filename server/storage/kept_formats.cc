#include "server/storage/kept_formats.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "common/versions/versions.h"

namespace shardd {
namespace {

// What is not said is 1: there was no other format before daemons said theirs.
int Said(int format) { return std::max(format, 1); }

absl::Status CheckOne(const char* what, int format, int oldest, int newest) {
  const VersionRange reads = {Said(oldest), Said(newest)};
  if (reads.Has(Said(format))) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("it does not read the format of the ", what, " (got ", Said(format), ", want ", reads.Text(), ")"));
}

}  // namespace

v1::KeptFormats KeptFormatsOf(int job_record, int journal, int take_up_log) {
  v1::KeptFormats formats;
  formats.set_job_record(job_record);
  formats.set_journal(journal);
  formats.set_take_up_log(take_up_log);
  return formats;
}

absl::Status CheckReads(const v1::HandOverRequest& request, const v1::KeptFormats& formats) {
  const v1::KeptFormats& oldest = request.oldest();
  const v1::KeptFormats& newest = request.newest();
  SHARDD_RETURN_IF_ERROR(CheckOne("job record", formats.job_record(), oldest.job_record(), newest.job_record()));
  SHARDD_RETURN_IF_ERROR(CheckOne("journal", formats.journal(), oldest.journal(), newest.journal()));
  return CheckOne("take-up log", formats.take_up_log(), oldest.take_up_log(), newest.take_up_log());
}

}  // namespace shardd
