#include "server/job/writes/passes.h"

#include <algorithm>

namespace shardd {

void Passes::Enter(int rank, bool stepped, uint64_t signal) {
  OfRank& of = ranks_[rank];
  of.pass = Pass::kEntering;
  of.stepped = stepped;
  of.enter_signal = signal;
  of.asks_to_store = of.has_edits = false;
}

bool Passes::any_edits() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const OfRank& rank) { return rank.has_edits; });
}

bool Passes::all_ask_to_store() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const OfRank& rank) { return rank.pass == Pass::kEntering && rank.asks_to_store; });
}

void Passes::ForgetTrainerStates() {
  for (OfRank& rank : ranks_) {
    rank.trainer_state.clear();
  }
}

void Passes::StepsCommitted() {
  saying_ = false;
  for (OfRank& rank : ranks_) {
    rank.stepped = false;
  }
}

void Passes::LetInAll() {
  announced_ = told_ = copied_ = false;
  for (OfRank& rank : ranks_) {
    rank.pass = Pass::kInside;
    rank.stepped = rank.has_edits = false;
  }
}

void Passes::EndEpoch() {
  ranks_.assign(ranks_.size(), OfRank());
  announced_ = told_ = copied_ = awaits_devices_ = saying_ = false;
}

}  // namespace shardd
