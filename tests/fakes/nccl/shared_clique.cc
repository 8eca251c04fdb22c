#include "tests/fakes/nccl/shared_clique.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

namespace shardd::nccl {
namespace {

// As the real one: asked once, so a process is of one host.
uint64_t Host() {
  static const uint64_t host = [] {
    const char* const told = std::getenv("NCCL_HOSTID");
    char name[256] = {};
    if (told == nullptr || *told == '\0') (void)gethostname(name, sizeof(name) - 1);
    return static_cast<uint64_t>(std::hash<std::string>()(told == nullptr || *told == '\0' ? name : told));
  }();
  return host;
}

}  // namespace

// A new file is all zeros, which is how everything here begins: whoever comes first makes it.
struct SharedMember::Area {
  std::atomic<uint32_t> claimed, joined, left, sums;
  uint64_t host, gpu;                 // before `joined`
  std::atomic<uint64_t> wrote, read;  // pieces
  Call call;                          // before `wrote`; pointers mean nothing here
  size_t calls, index, offset;        // likewise: of how many, which one, and where in it
  float piece[kRingPieceNumel];
};
// What one member sends to another, a piece at a time. The sender writes `wrote` and what is before it, the receiver
// writes `read`.
struct SharedMember::Channel {
  std::atomic<uint32_t> sends, receives;  // the first call was made; both: connected
  std::atomic<uint64_t> wrote, read;
  size_t count, bytes;  // of the whole call, of this piece
  char piece[kRingPieceNumel * sizeof(float)];
};
struct SharedMember::File {
  std::atomic<int> ranks;
  std::atomic<uint32_t> mismatched;
  Area areas[1];
};

SharedMember::Area& SharedMember::AreaOf(int rank) const { return file_->areas[rank]; }

SharedMember::Channel& SharedMember::ChannelOf(int from, int to) const {
  return reinterpret_cast<Channel*>(file_->areas + ranks_)[from * ranks_ + to];
}

std::unique_ptr<SharedMember> SharedMember::Join(const std::string& id, int ranks, int rank, uint64_t gpu) {
  std::unique_ptr<SharedMember> member(new SharedMember("/shardd-" + id, ranks, rank));
  const int fd = shm_open(member->name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  member->file_bytes_ = sizeof(File) + static_cast<size_t>(ranks - 1) * sizeof(Area) +
                        static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Channel);
  const bool sized = ftruncate(fd, static_cast<off_t>(member->file_bytes_)) == 0;
  void* const p = sized ? mmap(nullptr, member->file_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (p == MAP_FAILED) return nullptr;
  member->file_ = static_cast<File*>(p);
  int of_first = 0;
  member->file_->ranks.compare_exchange_strong(of_first, ranks);
  Area& area = member->AreaOf(rank);
  if ((of_first != 0 && of_first != ranks) || area.claimed.exchange(1) != 0) {
    member->left_ = true;  // not ours
    return nullptr;
  }
  area.host = Host();
  area.gpu = gpu;
  area.joined = 1;
  if (member->AllHaveJoined()) (void)shm_unlink(member->name_.c_str());
  return member;
}

SharedMember::~SharedMember() {
  Leave();
  if (file_ != nullptr) munmap(file_, file_bytes_);
}

void SharedMember::Leave() {
  if (file_ == nullptr || left_.exchange(true)) return;
  AreaOf(rank_).left = 1;
  if (!AllHaveJoined()) (void)shm_unlink(name_.c_str());  // nor will they
}

bool SharedMember::AllHaveJoined() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (AreaOf(rank).joined == 0) return false;
  }
  return true;
}

ncclResult_t SharedMember::State(std::string* why) const {
  if (!AllHaveJoined()) return ncclInProgress;
  for (int a = 0; a < ranks_; ++a) {
    for (int b = 0; b < a; ++b) {
      if (AreaOf(a).host != AreaOf(b).host || AreaOf(a).gpu != AreaOf(b).gpu) continue;
      *why = "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " + std::to_string(a) +
             " both on one CUDA device";
      return ncclInvalidUsage;
    }
  }
  if (file_->mismatched != 0) {
    *why = "members' calls differ";
    return ncclInvalidUsage;
  }
  int gone = waits_for_;
  if (IsConnecting(&gone) && gone < 0) return ncclInProgress;
  if (gone < 0) return ncclSuccess;
  *why = "Connection closed by remote peer : rank " + std::to_string(gone);
  return ncclRemoteError;
}

void SharedMember::Connect(const std::vector<Call>& calls, bool sums_connect) {
  for (const Call& call : calls) {
    if (call.moves) {
      (call.send != nullptr ? ChannelOf(rank_, call.root).sends : ChannelOf(call.root, rank_).receives) = 1;
    } else if (sums_connect) {
      AreaOf(rank_).sums = 1;
    }
  }
}

bool SharedMember::IsConnecting(int* gone) const {
  bool is_connecting = false;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Channel& to = ChannelOf(rank_, rank);
    const Channel& from = ChannelOf(rank, rank_);
    if ((to.sends == 0 || to.receives != 0) && (from.receives == 0 || from.sends != 0) &&
        (AreaOf(rank_).sums == 0 || AreaOf(rank).sums != 0)) {
      continue;
    }
    is_connecting = true;
    if (AreaOf(rank).left != 0) *gone = rank;
  }
  return is_connecting;
}

bool SharedMember::AwaitAll(std::atomic<uint64_t> Area::*counter, uint64_t value) {
  for (int rank = 0; rank < ranks_; ++rank) {
    Area& area = AreaOf(rank);
    for (int asked = 0; !left_ && area.*counter < value; ++asked) {
      if (area.left != 0 && area.*counter < value) waits_for_ = rank;
      if (asked > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return !left_;
}

void SharedMember::RunMoves(const std::vector<Call>& calls) {
  std::vector<size_t> moved(calls.size());
  size_t ended = 0;
  for (int asked = 0; !left_ && ended < calls.size(); ++asked) {
    std::vector<bool> busy(static_cast<size_t>(2 * ranks_));  // pairs keep their order
    for (size_t i = 0; i < calls.size(); ++i) {
      const Call& call = calls[i];
      const bool sends = call.send != nullptr;
      const auto pair = static_cast<size_t>(2 * call.root + (sends ? 1 : 0));
      if (moved[i] == call.count || busy[pair]) continue;
      busy[pair] = true;
      Channel& channel = sends ? ChannelOf(rank_, call.root) : ChannelOf(call.root, rank_);
      const size_t left = call.count - moved[i];
      if (sends && channel.wrote == channel.read) {
        channel.count = call.count;
        channel.bytes = std::min(left, sizeof(channel.piece));
        std::memcpy(channel.piece, reinterpret_cast<const char*>(call.send) + moved[i], channel.bytes);
        moved[i] += channel.bytes;
        ++channel.wrote;
      } else if (!sends && channel.wrote > channel.read) {
        if (channel.count != call.count) {
          file_->mismatched = 1;
          while (!left_) std::this_thread::sleep_for(std::chrono::microseconds(20));
          return;
        }
        std::memcpy(reinterpret_cast<char*>(call.receive) + moved[i], channel.piece, channel.bytes);
        moved[i] += channel.bytes;
        ++channel.read;
      } else {
        if (AreaOf(call.root).left != 0) waits_for_ = call.root;
        continue;
      }
      asked = 0;
      if (moved[i] == call.count) ++ended;
    }
    if (asked > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void SharedMember::Run(const std::vector<Call>& calls) {
  if (!calls.empty() && calls[0].moves) return RunMoves(calls);
  for (size_t index = 0; index < calls.size(); ++index) {
    for (size_t offset = 0; !left_ && offset < calls[index].count; offset += kRingPieceNumel) {
      RunPiece(calls, index, offset);
    }
  }
}

void SharedMember::RunPiece(const std::vector<Call>& calls, size_t index, size_t offset) {
  const Call& call = calls[index];
  const size_t numel = std::min(kRingPieceNumel, call.count - offset);
  Area& own = AreaOf(rank_);
  if (!AwaitAll(&Area::read, turn_)) return;
  std::memcpy(own.piece, call.send + offset, numel * sizeof(float));
  own.call = call;
  own.calls = calls.size();
  own.index = index;
  own.offset = offset;
  own.wrote = ++turn_;
  if (!AwaitAll(&Area::wrote, turn_)) return;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Area& area = AreaOf(rank);
    if (area.call == call && area.calls == own.calls && area.index == index && area.offset == offset) continue;
    file_->mismatched = 1;
    while (!left_) std::this_thread::sleep_for(std::chrono::microseconds(20));
    return;
  }
  if (call.all || call.root == rank_) {
    std::vector<const float*> sends;
    for (int rank = 0; rank < ranks_; ++rank) sends.push_back(AreaOf(rank).piece);
    std::vector<float> sum(numel, 0.0f);
    AddPiece(call, offset, sends, sum.data());
    std::memcpy(call.receive + offset, sum.data(), numel * sizeof(float));
  }
  own.read = turn_;
}

}  // namespace shardd::nccl
