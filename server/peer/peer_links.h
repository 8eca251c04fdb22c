#ifndef SHARDD_SERVER_PEER_PEER_LINKS_H_
#define SHARDD_SERVER_PEER_PEER_LINKS_H_

// A job's links to the daemons of the other nodes (its peers), which come and go. An interface, so that the job's state
// machines can be tested without sockets; peer_network.h makes real links.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

inline constexpr int64_t kMaxPeerSpecBytes = int64_t{64} << 20;

// A daemon's part in one job, for which it wants links.
struct PeerJoin {
  std::string job;  // its name
  uint32_t uid = 0;
  int node = 0;                        // of this daemon
  std::vector<std::string> addresses;  // "host:port", by node
  std::string spec;                    // serialized JobSpec, at most kMaxPeerSpecBytes
  std::string link_key = {};           // of the job's secret (server/tenant/tenant.h); empty: the job has none
  std::string data_path = {};          // of this node (PeerHello)
  std::string plan_digest = {};        // likewise
};

// Bytes of gradients and states since the links were made.
struct PeerTraffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// Held as long as a message that OnMessage has brought is not processed; dropped on any thread. While more than 4 MiB
// of a node's messages are not processed, no further ones are read from that node.
using PeerReceipt = std::shared_ptr<const void>;

// Thread-safe.
class PeerLinks {
 public:
  // Receives events on threads of the network, one at a time per node. Handlers must return soon.
  class Events {
   public:
    virtual ~Events() = default;
    // Whether the caller's hello describes the same job. Version and numbers are checked already.
    virtual absl::Status CheckHello(int node, const v1::PeerHello& hello) = 0;
    // What this node says with its own (PeerHello.has_parameters).
    virtual bool HasParameters() const { return false; }
    // A caller was refused before CheckHello because it has not the job's secret. PERMISSION_DENIED; the caller has it
    // too.
    virtual void OnRefused(int /*node*/, const absl::Status& /*why*/) {}
    // The link is up. Between this call and OnDown, messages arrive in the order in which they were sent.
    virtual void OnUp(int node) = 0;
    virtual void OnMessage(int node, v1::PeerMessage message, PeerReceipt receipt) = 0;
    // The link is down, or could not be made for more than a moment, or will never be (FAILED_PRECONDITION). Unless
    // FAILED_PRECONDITION, it is tried again while this object lives. May come without OnUp.
    virtual void OnDown(int node, absl::Status why) = 0;
    // A piece of gradients; `elements` are valid during the call.
    virtual void OnData(int node, const v1::PeerData& header, absl::string_view elements) = 0;
  };

  // Ends the links, giving sent messages up to 2 s to leave. No event is running when it returns. Must not be called
  // from an event.
  virtual ~PeerLinks() = default;
  virtual int node() const = 0;   // of this daemon
  virtual int nodes() const = 0;  // number of nodes
  virtual PeerTraffic traffic(int /*node*/) const { return {}; }
  // Of messages on the link; 0: there is none.
  virtual int protocol_version(int /*node*/) const { return 0; }
  // The node's daemon takes AsksToWrite and MayWrite, or there is no link: one that has just gone says nothing of it.
  virtual bool takes_writes_where_cut(int /*node*/) const { return true; }
  // Likewise Extends and MayExtend.
  virtual bool takes_extensions(int /*node*/) const { return true; }
  // Likewise what PeerHello.takes_fetch_ends says.
  virtual bool takes_fetch_ends(int /*node*/) const { return true; }
  // Links that wait for that are made from here on.
  virtual void Start() {}
  // Sends in order; drops the message if there is no link. Never blocks. A node that leaves 64 MiB unread loses its
  // link.
  virtual void Send(int node, v1::PeerMessage message) = 0;
  // Ends the link to the node, if there is one, and makes another. Never blocks.
  virtual void Renew(int /*node*/) {}
  // Sends one piece of gradients: `header` without elements, and at most kMaxDataBytes of `elements`, which must stay
  // valid until `sent` runs. `sent` runs once, on any thread: when the elements were taken, or with UNAVAILABLE if
  // there is no link any more.
  virtual void SendData(int node, const v1::PeerData& header, absl::string_view elements,
                        std::function<void(absl::Status)> sent) = 0;

  static constexpr int64_t kMaxDataBytes = int64_t{1} << 20;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_LINKS_H_
