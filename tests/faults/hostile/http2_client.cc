#include "tests/faults/hostile/http2_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd::faults::http2 {
namespace {

std::string Field(absl::string_view name, absl::string_view value) {  // HPACK: literal, not indexed; both below 127
  return absl::StrCat(std::string(1, 0), std::string(1, static_cast<char>(name.size())), name,
                      std::string(1, static_cast<char>(value.size())), value);
}

}  // namespace

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  return absl::StrCat(frame, payload);
}

std::string Preface() { return absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Frame(kSettings, 0, 0)); }

std::string Call(uint32_t stream, absl::string_view method) {
  return Frame(
      kHeaders, 0x4, stream,
      absl::StrCat(Field(":method", "POST"), Field(":scheme", "http"), Field(":path", method), Field(":authority", "x"),
                   Field("content-type", "application/grpc"), Field("te", "trailers")));
}

std::string Reset(uint32_t stream) { return Frame(kRstStream, 0, stream, absl::string_view("\0\0\0\x8", 4)); }

UniqueFd ConnectToPort(const std::string& address, const char* from) {
  UniqueFd connected(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in ip = {};
  ip.sin_family = AF_INET;
  inet_pton(AF_INET, from, &ip.sin_addr);
  if (bind(connected.get(), reinterpret_cast<const sockaddr*>(&ip), sizeof(ip)) != 0) {
    return UniqueFd();
  }
  inet_pton(AF_INET, "127.0.0.1", &ip.sin_addr);
  ip.sin_port = htons(static_cast<uint16_t>(std::atoi(address.substr(address.rfind(':') + 1).c_str())));
  if (connect(connected.get(), reinterpret_cast<const sockaddr*>(&ip), sizeof(ip)) != 0) {
    return UniqueFd();
  }
  return connected;
}

Client::Client(UniqueFd socket) : socket_(std::move(socket)) {
  reading_ = std::thread([this] {
    char buffer[65536];
    while (recv(socket_.get(), buffer, sizeof(buffer), 0) > 0) {
    }
    closed_ = true;
  });
  Send(Preface());
}

Client::~Client() {
  Close();
  reading_.join();
}

bool Client::Send(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

void Client::Close() { shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace shardd::faults::http2
