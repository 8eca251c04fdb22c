#ifndef SHARDD_SERVER_PEER_PEER_LINKS_H_
#define SHARDD_SERVER_PEER_PEER_LINKS_H_

// What a job that spans several nodes sees of the other daemons: a link to each, which comes and goes. An interface, so
// that the job's state machines are tested without sockets; peer_network.h makes real ones.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// What a daemon wants links for: its part in one job.
struct PeerJoin {
  std::string job;  // its name
  uint32_t uid = 0;
  int node = 0;                        // this one
  std::vector<std::string> addresses;  // "host:port", by node
  std::string spec;                    // JobSpec, serialized, at most 64 MiB
};

// Bytes of gradients, and of states, since the links are there.
struct PeerTraffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// Thread-safe.
class PeerLinks {
 public:
  // Called on threads of the network, one call at a time for each node; to return soon.
  class Events {
   public:
    virtual ~Events() = default;
    // Whether who wants a link describes the same job: version and numbers are checked already.
    virtual absl::Status CheckHello(int node, const v1::PeerHello& hello) = 0;
    // The link is there: between this call and OnDown messages arrive, in the order in which they were sent.
    virtual void OnUp(int node) = 0;
    virtual void OnMessage(int node, v1::PeerMessage message) = 0;
    // It is not any more, or could not be made for longer than a moment, or will never be: FAILED_PRECONDITION.
    // Otherwise it is tried again, for as long as this object lives. May come without OnUp.
    virtual void OnDown(int node, absl::Status why) = 0;
    // A piece of gradients; `elements` are valid during the call.
    virtual void OnData(int node, const v1::PeerData& header, absl::string_view elements) = 0;
  };

  // Ends the links: messages that were sent are given a moment (2 s) to leave. No event runs when it returns. Not to be
  // called from an event.
  virtual ~PeerLinks() = default;
  virtual int node() const = 0;   // this one
  virtual int nodes() const = 0;  // how many
  virtual PeerTraffic traffic(int /*node*/) const { return {}; }
  // Sent in order; dropped where there is no link. Never blocks. A node that does not read for long (64 MiB) loses its
  // link.
  virtual void Send(int node, v1::PeerMessage message) = 0;
  // One piece of gradients: `header` without elements, of at most kMaxDataBytes, which stay valid until `sent` has run:
  // once, on any thread, when they were taken, or with UNAVAILABLE where there is no link any more.
  virtual void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                        std::function<void(absl::Status)> sent) = 0;

  static constexpr int64_t kMaxDataBytes = int64_t{1} << 20;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_LINKS_H_
