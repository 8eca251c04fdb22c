#include "server/multinode/node_restore.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/loop/core_loop.h"
#include "server/peer/peer_links.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr int64_t kElementBytes = 4;  // slabs are cut at kSlabAlignmentBytes
constexpr int64_t kPieceBytes = PeerLinks::kMaxDataBytes;
constexpr int kPiecesUnderWay = 8;

}  // namespace

absl::Status StateSlab::ForEach(int64_t sent_offset, int64_t size_bytes, Part part) const {
  if (held.empty()) return part(first_bytes + sent_offset, sent_offset, size_bytes);
  int64_t before = 0;  // bytes of the ranges so far
  for (const ByteRange& range : held) {
    const int64_t first = std::max(sent_offset, before);
    const int64_t end = std::min(sent_offset + size_bytes, before + range.end - range.first);
    if (first < end) {
      SHARDD_RETURN_IF_ERROR(part(first_bytes + range.first + first - before, first, end - first));
    }
    before += range.end - range.first;
  }
  return absl::OkStatus();
}

NodeRestore::NodeRestore(uint64_t transfer, const StateSlabs& slabs, std::function<void(absl::Status)> done)
    : transfer_(transfer), slabs_(slabs), done_(std::move(done)) {}

void NodeRestore::Take(const v1::PeerData& header, absl::string_view elements) {
  absl::MutexLock lock(&mutex_);
  if (header.sequence() != transfer_ || done_ == nullptr) {
    return;
  }
  const size_t index = header.slab() == slabs_[0].name ? 0 : 1;
  const StateSlab& slab = slabs_[index];
  const auto size = static_cast<int64_t>(elements.size());
  absl::Status status;
  if (header.slab() != slab.name || header.numel() != slab.bytes / kElementBytes ||
      header.offset() != received_[index] / kElementBytes || size > slab.bytes - received_[index]) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "state from another node: another piece was to come (got ", size, " bytes of ", v1::Slab_Name(header.slab()),
        " at ", header.offset() * kElementBytes, " of ", header.numel() * kElementBytes, ", want ",
        v1::Slab_Name(slab.name), " at ", received_[index], " of ", slab.bytes, ")"));
  } else {
    const int64_t first = received_[index];
    status = slab.ForEach(first, size, [&](int64_t offset, int64_t sent_offset, int64_t part_bytes) {
      return slab.slab->Write(offset, elements.data() + sent_offset - first, part_bytes);
    });
    received_[index] += size;
  }
  if (!status.ok() || (received_[0] == slabs_[0].bytes && received_[1] == slabs_[1].bytes)) {
    std::exchange(done_, nullptr)(std::move(status));
  }
}

std::shared_ptr<StateSender> StateSender::Start(uint64_t transfer, const StateSlabs& slabs, PeerLinks* links, int node,
                                                CoreLoop* worker, Failed failed, std::shared_ptr<void> keep) {
  std::shared_ptr<StateSender> sender(
      new StateSender(transfer, slabs, links, node, worker, std::move(failed), std::move(keep)));
  worker->Post([sender] { sender->Run(); });
  return sender;
}

void StateSender::Run() {
  while (!cancelled_ && slab_ < slabs_.size() && under_way_ < kPiecesUnderWay) {
    const StateSlab& slab = slabs_[slab_];
    if (sent_bytes_ == slab.bytes) {
      ++slab_;
      sent_bytes_ = 0;
      continue;
    }
    const auto piece = std::make_shared<std::string>();
    piece->resize(static_cast<size_t>(std::min(kPieceBytes, slab.bytes - sent_bytes_)));
    const absl::Status read = slab.ForEach(
        sent_bytes_, static_cast<int64_t>(piece->size()), [&](int64_t offset, int64_t sent_offset, int64_t part_bytes) {
          return slab.slab->Read(offset, piece->data() + sent_offset - sent_bytes_, part_bytes);
        });
    if (!read.ok()) {
      cancelled_ = true;
      failed_(read);
      return;
    }
    v1::PeerData header;
    header.set_sequence(transfer_);
    header.set_slab(slab.name);
    header.set_offset(sent_bytes_ / kElementBytes);
    header.set_numel(slab.bytes / kElementBytes);
    sent_bytes_ += static_cast<int64_t>(piece->size());
    ++under_way_;
    links_->SendData(node_, header, *piece, [self = shared_from_this(), piece](const absl::Status& status) {
      if (!status.ok()) {
        self->cancelled_ = true;  // a link that is lost is everybody's news already
      }
      --self->under_way_;
      self->worker_->Post([self] { self->Run(); });
    });
  }
}

}  // namespace shardd
