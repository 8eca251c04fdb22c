#include "client/c/job/store_faults.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/shards.h"

namespace shardd {

bool StoreFaults::OnStoreFault(const void* address) {
  if (windows_.open() && attachment_.memory().WindowCovers(address)) {
    return true;  // another thread's fault has opened it
  }
  if (optimizer_.IsDaemons(address)) {
    if (!optimizer_.has_stores()) {
      optimizer_.NoteStores(NameAt(attachment_, address));
    }
    return attachment_.memory().optimizer_slab().MakePiecePrivate(address);
  }
  absl::Status status = Allow(address);
  if (status.ok()) {
    return true;
  }
  // The store cannot be undone and nobody may see it: it goes to a copy of this process, and the next call says why.
  for (const MappedSlab* slab : attachment_.memory().watched_slabs()) {
    if (slab->data() != nullptr && !slab->MakePrivate()) {
      return false;
    }
  }
  attachment_.Fail(std::move(status));
  return true;
}

absl::Status StoreFaults::Allow(const void* address) {
  const auto in = [address](const MappedSlab& slab) {
    const auto* begin = static_cast<const char*>(slab.data());
    return begin != nullptr && address >= begin && address < begin + slab.size_bytes();
  };
  const auto refuse = [&](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("write ", NameAt(attachment_, address), ": ", why, " (rank=", attachment_.rank(), ")"));
  };
  if (in(attachment_.memory().parameters_slab())) {
    return refuse("its cast copy is made by the daemon; reshard, and write the shard");
  }
  if (!attachment_.plan().trainers_write()) {
    return refuse("the job was opened with trainers that never write (got trainersNeverWrite true, want false)");
  }
  if (passes_.reading()) {
    return refuse(
        "written inside a pass, while other ranks may read it; write between a backward, or a forward without "
        "gradients, and the next forward");
  }
  if (handles_.in_full_params()) {
    return refuse(
        "written while this rank is inside of full parameters, where others may read it; write into the full "
        "parameters, with writeback, or outside");
  }
  attachment_.session().life().set_in_signal(true);
  absl::Status status;
  if (passes_.paused()) {
    status = passes_.LeaveFor(NameAt(attachment_, address));
  }
  if (status.ok()) {
    status = passes_.OpenWindow();
  }
  attachment_.session().life().set_in_signal(false);
  return status;
}

}  // namespace shardd
