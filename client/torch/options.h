#ifndef SHARDD_CLIENT_TORCH_OPTIONS_H_
#define SHARDD_CLIENT_TORCH_OPTIONS_H_

// How a torch::nn::Module is to be sharded. What all ranks of a job must agree on is said so; a difference is an error
// of ShardedModule::Shard that names the field and both values.

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace shardd {

enum class Strategy {
  kFullShard,         // reshard after forward, unshard again for backward
  kShardGradOp,       // unsharded from forward to the end of backward
  kNoShard,           // every rank owns everything
  kHybridShard,       // kFullShard within shard groups, which are replicas of one another
  kHybridShardZero2,  // kShardGradOp likewise
};
enum class ShardLayout {
  kFlat,  // the group's flat parameter is cut into equal shards
  kDim0,  // each parameter's rows are cut as torch.chunk cuts them
};
enum class UnshardMode {
  kZeroCopy,  // ranks map the node's parameters
  kPooled,    // copied into slots of the unsharded pool, once per node (tight memory)
};
enum class BackwardPrefetch {
  kPre,   // the next group is asked for when this one's backward begins
  kPost,  // ... when this one's backward has ended
  kNone,
};
enum class OptimizerKind { kNone, kAdamW, kSgd, kAdam, kAdagrad, kRmsprop, kCenteredRmsprop, kLion, kMuon, kAdafactor };

struct ShardOptions {
  // In what parameters are computed with and gradients are added; shards keep the dtype that the module had.
  struct MixedPrecision {
    std::optional<at::ScalarType> param_dtype;  // the module's parameters become tensors of it
    std::optional<at::ScalarType> reduce_dtype;
    bool keep_low_precision_grads = false;  // sums are kept in reduce_dtype, else in param_dtype
    // Parameters that are cut over nodes cross them in float8 with a scale for each 128 elements, and ranks compute
    // with the values so rounded. On CPUs; UNIMPLEMENTED where nothing is cut over nodes.
    bool float8_gathers = false;
  };
  // The daemon's optimizer.
  struct Optimizer {
    OptimizerKind kind = OptimizerKind::kAdamW;  // of all parameters: kMuon where all are matrices, on CPUs;
                                                 // kAdafactor on CPUs
    bool momentum = false;                       // kSgd, kRmsprop: plan a momentum buffer
    // FQNs of optimizer groups 1, 2, ...; all other parameters are group 0.
    std::vector<std::vector<std::string>> groups;
  };
  // Several nodes. world_size and rank are then of this node (LOCAL_WORLD_SIZE, LOCAL_RANK). FULL_SHARD and
  // SHARD_GRAD_OP cut parameters over the ranks of all nodes; with the hybrid strategies each node has all of them.
  struct Nodes {
    // What each node's daemon is to the others (its --peer_address), "host:port", node 0's first, all ranks alike.
    std::vector<std::string> addresses;
    int own = -1;  // which of them this node is; negative: SHARDD_NODE, or what the launcher says of it
  };

  // Where and who. Empty or negative: from the environment, see client/c/shardd.h (RANK, WORLD_SIZE, SHARDD_ADDRESS).
  std::string job_name;  // required; 1 to 128 characters of [A-Za-z0-9._-]
  int world_size = 0;
  int rank = -1;
  std::string address;
  Nodes nodes;             // where there are several
  bool replace = false;    // kill a live holder of this rank and take its place
  int64_t timeout_ms = 0;  // bound of attach and of every wait; 0: 300 000

  // Which modules become fully sharded modules: those of these classes (the name without namespaces and without the
  // "Impl" that torch::nn::ModuleHolder asks for), those with these FQNs, those with at least min_numel parameters. The
  // root is one as well. All ranks alike, as is everything below.
  std::vector<std::string> fully_shard_classes;
  std::vector<std::string> fully_shard_fqns;
  int64_t min_numel = 0;                              // 0: no such rule
  std::map<std::string, bool> reshard_after_forward;  // by FQN of a fully sharded module: overrides the strategy's rule
  // By FQN likewise: reshard_after_forward as an integer. A key that is no fully sharded module is an error.
  std::map<std::string, int> post_forward_shard_size;

  // What is left out and not entered, by FQN: modules, with everything below them, or single parameters. They stay
  // ordinary tensors of the trainer, get their .grad from Backward and are the trainer's to update; they may not share
  // memory with managed ones. Three words for whose affair they are; shardd treats them alike. May differ between
  // ranks.
  std::vector<std::string> ignored;          // the trainer's own
  std::vector<std::string> replicate;        // another mechanism keeps them equal on all ranks
  std::vector<std::string> already_sharded;  // tensor parallel, or sharded by another ShardedModule

  Strategy strategy = Strategy::kFullShard;
  // Hybrid strategies: ranks of one shard group, or which ranks (JobConfig.shard_group_size and shard_groups). Neither:
  // all ranks of the node.
  int shard_group_size = 0;
  std::vector<std::vector<int>> shard_groups;
  ShardLayout layout = ShardLayout::kFlat;
  std::optional<UnshardMode> unshard_mode;  // none: kZeroCopy; kPooled where parameters are cut over nodes
  int max_inflight_unshards = 0;            // kPooled: 0 is the daemon's default
  bool forward_prefetch = false;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  MixedPrecision mixed_precision;

  Optimizer optimizer;
  double gradient_divide_factor = 0;  // 0: the world size

  bool strict_order = false;
  bool allow_missing_contribution = false;
  int64_t silence_timeout_ms = 0;  // 0: the daemon's default
  int64_t grace_ms = 0;            // 0: the daemon's default
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_OPTIONS_H_
