#include "server/job/job_events.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/step/committed.h"
#include "server/observe/log.h"

namespace shardd {

void JobEvents::Add(int rank, absl::string_view kind, std::string text) {
  LogOf(owner_.uid, kind == "lost" || kind == "refused" || kind == "abort" ? LogLevel::kWarning : LogLevel::kInfo,
        absl::StrCat("job ", job_, " epoch ", committed_->epoch(), " step ", committed_->step(),
                     rank >= 0 ? " rank " : "", rank >= 0 ? absl::StrCat(rank) : "", " ", kind, ": ", text));
  events_->Add(job_, owner_, committed_->epoch(), committed_->step(), rank, kind, std::move(text));
}

}  // namespace shardd
