#ifndef SHARDD_TESTS_BENCH_HOSTILE_NEIGHBOUR_H_
#define SHARDD_TESTS_BENCH_HOSTILE_NEIGHBOUR_H_

#include <functional>
#include <map>
#include <string>

namespace shardd::bench {

// What a hostile client of the same user does to a daemon: `before` gets ready, `itself` is what is measured. Attacks
// but "steps" last SHARDD_BENCH_ATTACK_MS (200 if not set) at most. Exits the process with a message if the
// attack cannot be made.
struct Attack {
  std::function<void(const std::string&address)> before, itself;
};

// By name: "steps" (60 ranks send Steps of unknown fields), "resets" (HTTP/2 rapid reset on 20 connections), "pings",
// "connections" (10,000 of them, as many at a time as the process may have open).
const std::map<std::string, Attack>& Attacks();

}  // namespace shardd::bench

#endif  // SHARDD_TESTS_BENCH_HOSTILE_NEIGHBOUR_H_
