#include "client/examples/gpt/flags.h"

#include <getopt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <variant>
#include <vector>

namespace gpt {
namespace {

struct Flag {
  const char* name;
  std::variant<int64_t Flags::*, double Flags::*, std::string Flags::*, bool Flags::*> field;
  const char* help;
};

const Flag kFlags[] = {
    {"layers", &Flags::layers, "blocks of the model"},
    {"width", &Flags::width, "model width"},
    {"heads", &Flags::heads, "attention heads; divides the width"},
    {"context", &Flags::context, "characters that the model sees"},
    {"batch", &Flags::batch, "rows per rank and micro-batch"},
    {"accumulate", &Flags::accumulate, "micro-batches per step"},
    {"steps", &Flags::steps, "optimizer steps in all"},
    {"lr", &Flags::lr, "highest learning rate"},
    {"weight_decay", &Flags::weight_decay, "of AdamW"},
    {"clip", &Flags::clip, "global gradient norm; 0: off"},
    {"seed", &Flags::seed, "of values and data"},
    {"text", &Flags::text, "train on this file instead of /usr/share/common-licenses"},
    {"job", &Flags::job, "name of the job"},
    {"address", &Flags::address, "daemon: unix:/path; else SHARDD_ADDRESS or one of its own"},
    {"rank", &Flags::rank, "else RANK"},
    {"ranks", &Flags::ranks, "world size, else WORLD_SIZE"},
    {"strategy", &Flags::strategy, "full_shard, shard_grad_op or no_shard"},
    {"layout", &Flags::layout, "flat or dim0"},
    {"dtype", &Flags::dtype, "fp32 or bf16: parameters in forward and backward"},
    {"reference", &Flags::reference, "one unsharded process trains on the batches of all ranks"},
    {"floor", &Flags::floor, "forward and backward of this rank only: what a step costs without sharding"},
    {"threads", &Flags::threads, "of this process"},
    {"out", &Flags::out, "append one JSON line per step to this file"},
    {"sample", &Flags::sample, "characters to generate after training"},
    {"prompt", &Flags::prompt, "what they start with"},
    {"log_every", &Flags::log_every, "steps between lines on stdout; 0: none"},
};

void PrintHelp() {
  const Flags defaults;
  std::printf("gpt: trains a character model through shardd. Flags, with their defaults:\n");
  for (const Flag& flag : kFlags) {
    std::string value;
    if (auto* integer = std::get_if<int64_t Flags::*>(&flag.field)) {
      value = std::to_string(defaults.*(*integer));
    } else if (auto* real = std::get_if<double Flags::*>(&flag.field)) {
      char text[32];
      std::snprintf(text, sizeof(text), "%g", defaults.*(*real));
      value = text;
    } else if (auto* string = std::get_if<std::string Flags::*>(&flag.field)) {
      value = "\"" + defaults.*(*string) + "\"";
    }
    std::printf("  --%-13s %-16s %s\n", flag.name, value.c_str(), flag.help);
  }
}

bool ParseValue(const Flag& flag, const char* text, Flags* flags) {
  char* end = nullptr;
  if (auto* integer = std::get_if<int64_t Flags::*>(&flag.field)) {
    flags->*(*integer) = std::strtoll(text, &end, 10);
    return end != text && *end == '\0';
  }
  if (auto* real = std::get_if<double Flags::*>(&flag.field)) {
    flags->*(*real) = std::strtod(text, &end);
    return end != text && *end == '\0';
  }
  if (auto* string = std::get_if<std::string Flags::*>(&flag.field)) {
    flags->*(*string) = text;
    return true;
  }
  flags->*std::get<bool Flags::*>(flag.field) = true;
  return true;
}

const char* Complaint(const Flags& flags) {
  if (flags.layers < 1 || flags.width < 1 || flags.heads < 1 || flags.width % flags.heads != 0) {
    return "--layers, --width and --heads must be positive and the heads divide the width";
  }
  if (flags.context < 1 || flags.batch < 1 || flags.accumulate < 1 || flags.steps < 0 || flags.threads < 1) {
    return "--context, --batch, --accumulate and --threads must be positive, --steps not negative";
  }
  if (flags.rank < 0 || flags.ranks < 1 || flags.rank >= flags.ranks) {
    return "the rank must lie in 0 to ranks - 1 (--rank or RANK, --ranks or WORLD_SIZE)";
  }
  if (flags.strategy != "full_shard" && flags.strategy != "shard_grad_op" && flags.strategy != "no_shard") {
    return "--strategy must be full_shard, shard_grad_op or no_shard";
  }
  if ((flags.layout != "flat" && flags.layout != "dim0") || (flags.dtype != "fp32" && flags.dtype != "bf16")) {
    return "--layout must be flat or dim0, --dtype fp32 or bf16";
  }
  return nullptr;
}

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoll(text, nullptr, 10);
}

}  // namespace

bool ParseFlags(int argc, char** argv, Flags* flags, int* exit_code) {
  std::vector<option> options;
  for (const Flag& flag : kFlags) {
    const bool takes_value = !std::holds_alternative<bool Flags::*>(flag.field);
    options.push_back({flag.name, takes_value ? required_argument : no_argument, nullptr, 0});
  }
  const int help = static_cast<int>(options.size());
  options.push_back({"help", no_argument, nullptr, 0});
  options.push_back({nullptr, 0, nullptr, 0});
  int index = 0;
  int found = 0;
  *exit_code = 2;
  while ((found = getopt_long(argc, argv, "", options.data(), &index)) == 0) {
    if (index == help) {
      PrintHelp();
      *exit_code = 0;
      return false;
    }
    if (!ParseValue(kFlags[index], optarg, flags)) {
      std::fprintf(stderr, "gpt: --%s: not a number (got \"%s\")\n", kFlags[index].name, optarg);
      return false;
    }
  }
  if (found != -1 || optind != argc) {
    std::fprintf(stderr, "gpt: unknown argument; see --help\n");
    return false;
  }
  flags->ranks = flags->ranks > 0 ? flags->ranks : FromEnvironment("WORLD_SIZE", 1);
  flags->rank = flags->rank >= 0 ? flags->rank : FromEnvironment("RANK", 0);
  if (const char* complaint = Complaint(*flags)) {
    std::fprintf(stderr, "gpt: %s\n", complaint);
    return false;
  }
  return true;
}

}  // namespace gpt
