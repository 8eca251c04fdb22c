#include "server/peer/late_links.h"

#include <utility>

#include "absl/time/time.h"

namespace shardd {
namespace {

constexpr absl::Duration kAgain = absl::Milliseconds(5);

}  // namespace

LateLinks::LateLinks(int node, int nodes, Join join, std::function<void(const absl::Status&)> failed)
    : node_(node), nodes_(nodes), join_(std::move(join)), failed_(std::move(failed)) {}

LateLinks::~LateLinks() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  links_ = nullptr;
  std::unique_ptr<PeerLinks> made;  // freed without the lock: what ends with them may look at these links
  absl::MutexLock lock(&mutex_);
  made.swap(made_);
}

void LateLinks::Start() {
  thread_ = std::thread([this] { JoinWhenFree(); });
}

void LateLinks::JoinWhenFree() {
  const auto stops = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stops_; };
  absl::MutexLock lock(&mutex_);
  do {
    absl::StatusOr<std::unique_ptr<PeerLinks>> made = join_();
    if (made.ok()) {
      made_ = *std::move(made);
      links_ = made_.get();
      return;
    }
    if (!absl::IsAlreadyExists(made.status())) {
      failed_(made.status());
      return;
    }
  } while (!changed_.Await(&mutex_, stops, Deadline::In(kAgain)));
}

PeerLinks* LateLinks::Links() const {
  if (PeerLinks* const links = links_; links != nullptr) return links;
  absl::MutexLock lock(&mutex_);
  return made_.get();
}

PeerTraffic LateLinks::traffic(int node) const {
  const PeerLinks* const links = Links();
  return links == nullptr ? PeerTraffic() : links->traffic(node);
}

int LateLinks::protocol_version(int node) const {
  const PeerLinks* const links = Links();
  return links == nullptr ? 0 : links->protocol_version(node);
}

bool LateLinks::takes_writes_where_cut(int node) const {
  const PeerLinks* const links = Links();
  return links == nullptr || links->takes_writes_where_cut(node);
}

bool LateLinks::takes_extensions(int node) const {
  const PeerLinks* const links = Links();
  return links == nullptr || links->takes_extensions(node);
}

bool LateLinks::takes_fetch_ends(int node) const {
  const PeerLinks* const links = Links();
  return links == nullptr || links->takes_fetch_ends(node);
}

void LateLinks::Renew(int node) {
  if (PeerLinks* const links = Links(); links != nullptr) links->Renew(node);
}

void LateLinks::Send(int node, v1::PeerMessage message) {
  if (PeerLinks* const links = Links(); links != nullptr) links->Send(node, std::move(message));
}

void LateLinks::SendData(int node, const v1::PeerData& header, absl::string_view elements,
                         std::function<void(absl::Status)> sent) {
  if (PeerLinks* const links = Links(); links != nullptr) {
    links->SendData(node, header, elements, std::move(sent));
  } else {
    sent(absl::UnavailableError("there is no link"));
  }
}

}  // namespace shardd
