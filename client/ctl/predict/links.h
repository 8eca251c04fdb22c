#ifndef SHARDD_CLIENT_CTL_PREDICT_LINKS_H_
#define SHARDD_CLIENT_CTL_PREDICT_LINKS_H_

#include <array>
#include <limits>

#include "client/ctl/predict/machine.h"
#include "client/ctl/predict/transfers.h"

namespace shardd::ctl {

// One gather or reduction on its way: its fixed time, then other nodes' bytes, then those of this node, then its own
// memory's. Transfers that are at the same link share it evenly.
class Transfer {
 public:
  Transfer(const Machine& machine, const Fleet& fleet, const Traffic& traffic)
      : left_{machine.transfer_s + (traffic.node_link_bytes > 0 ? (fleet.nodes - 1) * machine.other_node_s : 0),
              traffic.node_link_bytes / machine.node_link_bytes_per_s,
              traffic.device_link_bytes / machine.device_link_bytes_per_s,
              traffic.memory_bytes / machine.memory_bytes_per_s} {
    Skip();
  }
  static constexpr int kPhases = 4;
  int phase() const { return phase_; }  // kPhases: it has ended
  bool ended() const { return phase_ == kPhases; }
  double left_s() const {
    return ended() ? 0 : left_[static_cast<size_t>(phase_)];
  }  // of this phase, alone at its link
  void Advance(double alone_s) {
    left_[static_cast<size_t>(phase_)] -= alone_s;
    Skip();
  }

 private:
  static constexpr double kNothing = 1e-12;
  void Skip() {
    while (!ended() && left_[static_cast<size_t>(phase_)] <= kNothing) ++phase_;
  }
  std::array<double, kPhases> left_;
  int phase_ = 0;
};

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_LINKS_H_
