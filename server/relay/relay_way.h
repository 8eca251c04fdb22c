#ifndef SHARDD_SERVER_RELAY_RELAY_WAY_H_
#define SHARDD_SERVER_RELAY_RELAY_WAY_H_

#include <cstddef>
#include <memory>

#include "absl/strings/string_view.h"

namespace shardd {

// One direction of a relayed connection: what epoll says is possible on its two sockets, and at most one buffer of
// bytes in transit. The connection owns the sockets. Used by the relay's thread only.
struct RelayWay {
  size_t buffer_size_bytes = 16 << 10;
  int from = -1;
  int to = -1;
  bool readable = false;
  bool writable = true;
  bool eof = false;      // of `from`
  bool discard = false;  // `to` accepts nothing any more
  std::unique_ptr<char[]> buffer;
  size_t begin = 0, end = 0;  // the bytes in it, `end` excluded

  bool empty() const { return begin == end; }
  // Reads into the empty buffer. Returns true if there was something to read.
  bool Fill();
  // Sends up to `most_bytes` of the buffer and sets `sent`. Returns true if the caller may continue.
  bool Send(size_t most_bytes, size_t* sent);
  // Appends bytes of the relay itself. REQUIRES: all such bytes for one client fit into one buffer.
  void Say(absl::string_view bytes);
  void FreeBufferIfEmpty();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_RELAY_RELAY_WAY_H_
