#include "client/examples/gpt/flags.h"

#include <cstdio>

#include "CLI/CLI.hpp"

namespace gpt {

bool ParseFlags(int argc, char** argv, Flags* flags, int* exit_code) {
  CLI::App app("gpt: trains a character model through shardd", "gpt");
  // Whoever calls through a script adds options to those that it gives: the last one counts.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->always_capture_default();
  const auto integer = [&app](const char* name, int64_t& value, const char* help, int64_t least) {
    return app.add_option(name, value, help)->check(CLI::Range(least, int64_t{1} << 40).description(""));
  };
  integer("--layers", flags->layers, "blocks of the model", 1);
  integer("--width", flags->width, "model width", 1);
  integer("--heads", flags->heads, "attention heads; divides the width", 1);
  integer("--context", flags->context, "characters that the model sees", 1);
  integer("--batch", flags->batch, "rows per rank and micro-batch", 1);
  integer("--accumulate", flags->accumulate, "micro-batches per step", 1);
  integer("--steps", flags->steps, "optimizer steps in all", 0);
  app.add_option("--lr", flags->lr, "highest learning rate");
  app.add_option("--weight_decay", flags->weight_decay, "of AdamW");
  app.add_option("--clip", flags->clip, "global gradient norm; 0: off");
  app.add_option("--seed", flags->seed, "of values and data");
  app.add_option("--text", flags->text, "train on this file instead of /usr/share/common-licenses");
  app.add_option("--job", flags->job, "name of the job");
  app.add_option("--address", flags->address, "daemon: unix:/path; else SHARDD_ADDRESS or one of its own");
  integer("--rank", flags->rank, "of this process", 0)->envname("RANK");
  integer("--ranks", flags->ranks, "world size", 1)->envname("WORLD_SIZE");
  app.add_option("--strategy", flags->strategy)->check(CLI::IsMember({"full_shard", "shard_grad_op", "no_shard"}));
  app.add_option("--layout", flags->layout)->check(CLI::IsMember({"flat", "dim0"}));
  app.add_option("--dtype", flags->dtype, "of parameters in forward and backward")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_flag("--reference", flags->reference, "one unsharded process trains on the batches of all ranks");
  app.add_flag("--floor", flags->floor, "forward and backward of this rank only: what a step costs without sharding");
  integer("--threads", flags->threads, "of this process", 1);
  app.add_option("--out", flags->out, "append one JSON line per step to this file");
  integer("--sample", flags->sample, "characters to generate after training", 0);
  app.add_option("--prompt", flags->prompt, "what they start with");
  integer("--log_every", flags->log_every, "steps between lines on stdout; 0: none", 0);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error) == 0 ? 0 : 2;  // it prints the help, or what is wrong
    return false;
  }
  *exit_code = 2;
  if (flags->width % flags->heads != 0) {
    std::fprintf(stderr, "gpt: --heads: must divide --width\n");
    return false;
  }
  if (flags->rank >= flags->ranks) {
    std::fprintf(stderr, "gpt: --rank: must be less than --ranks (RANK, WORLD_SIZE)\n");
    return false;
  }
  return true;
}

}  // namespace gpt
