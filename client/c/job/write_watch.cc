#include "client/c/job/write_watch.h"

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status WriteWatch::Set(bool watch) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const bool on_device = attachment_.memory().on_device();
  if (on_device && attachment_.plan().pass_copies()) {
    return absl::OkStatus();  // stores need nobody's leave
  }
  if (watch && on_device) {
    return absl::UnimplementedError(absl::StrCat(
        "watch_writes job \"", attachment_.plan().job(), "\": its memory lies on ", attachment_.device(),
        ", where no store can be caught (rank=", attachment_.rank(), "); do not write to what is read-only"));
  }
  watching_ = watch;
  if (!watch) {
    WriteFaults::Forget(handler_);
    return absl::OkStatus();
  }
  return WatchSlabs();
}

void WriteWatch::OnNewSession() {
  WriteFaults::Forget(handler_);
  OnSlabMapped();
}

void WriteWatch::OnSlabMapped() {
  if (watching_) {
    (void)WatchSlabs();
  }
}

absl::Status WriteWatch::WatchSlabs() {
  int which = 0;
  for (const MappedSlab* slab : attachment_.memory().watched_slabs()) {
    if (slab->data() != nullptr) {
      SHARDD_RETURN_IF_ERROR(WriteFaults::Watch(handler_, which, slab->data(), slab->size_bytes()));
    }
    ++which;
  }
  return absl::OkStatus();
}

}  // namespace shardd
