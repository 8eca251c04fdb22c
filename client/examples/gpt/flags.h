#ifndef SHARDD_CLIENT_EXAMPLES_GPT_FLAGS_H_
#define SHARDD_CLIENT_EXAMPLES_GPT_FLAGS_H_

#include <cstdint>
#include <string>

namespace gpt {

// Defaults give a model of about 10 million parameters.
struct Flags {
  // model
  int64_t layers = 6;
  int64_t width = 384;
  int64_t heads = 6;
  int64_t context = 128;
  // training
  int64_t batch = 8;       // rows per rank and micro-batch
  int64_t accumulate = 1;  // micro-batches per step
  int64_t steps = 200;
  double lr = 1e-3;  // highest: 20 steps of warm-up, then cosine down to a tenth
  double weight_decay = 0.1;
  double clip = 1.0;  // global gradient norm; 0: do not clip
  int64_t seed = 1;
  std::string text;  // file; empty: the files of /usr/share/common-licenses
  // sharding
  std::string job = "gpt";
  std::string address;  // empty: SHARDD_ADDRESS, or a daemon of this job's own
  int64_t rank = 0;     // or RANK
  int64_t ranks = 1;    // or WORLD_SIZE
  std::string strategy = "full_shard";
  std::string layout = "flat";
  std::string dtype = "fp32";  // of parameters in forward and backward
  bool reference = false;      // no daemon: one process trains on the batches of all ranks
  bool floor = false;          // no daemon, no optimizer: forward and backward of this rank alone, to measure against
  // process
  int64_t threads = 1;
  std::string out;     // JSON lines are appended here
  int64_t sample = 0;  // characters to generate after training (rank 0)
  std::string prompt = "The license ";
  int64_t log_every = 10;  // lines on stdout (rank 0); 0: none
};

// False after printing a message or the help text; *exit_code is then the status to end with.
bool ParseFlags(int argc, char** argv, Flags* flags, int* exit_code);

}  // namespace gpt

#endif  // SHARDD_CLIENT_EXAMPLES_GPT_FLAGS_H_
