// What must hold of every plan, over random trees. Each case names its seed; RandomSpec(seed) repeats it.

#include <map>
#include <set>

#include "google/protobuf/stubs/logging.h"
#include "tests/common/plan/property_fixture.h"

namespace shardd {
namespace {

TEST_F(Property, FlatShardsAreEqualAndTheirMetadataAddsUp) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    if (plan.config.layout() != v1::LAYOUT_FLAT) {
      return;
    }
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      const FlatParamPlan& flat = plan.flat_params[f];
      ASSERT_EQ(flat.padded_numel, flat.shard_numel * plan.placement.pieces(Purpose::kParameters));
      ASSERT_EQ(flat.shard_numel * DTypeSizeBytes(flat.dtype) % kParamAlignmentBytes, 0);
      ASSERT_EQ(flat.shard_numel * DTypeSizeBytes(flat.unsharded_dtype) % kParamAlignmentBytes, 0);
      ASSERT_LE(flat.numel, flat.padded_numel);
      ASSERT_LT(flat.padded_numel - flat.numel, plan.placement.pieces(Purpose::kOptimizer) * 16);
      for (int rank = 0; rank < plan.world_size; ++rank) {
        const absl::StatusOr<ShardMetadata> metadata = GetShardMetadata(plan, f, rank);
        int64_t numel = metadata->padding_numel;
        for (const ShardMetadata::Piece& piece : metadata->pieces) {
          numel += piece.numel;
        }
        ASSERT_GE(metadata->padding_numel, 0);
        ASSERT_EQ(numel, flat.shard_numel);
      }
    }
  });
}

TEST_F(Property, EveryElementMakesTheRoundTripThroughShards) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    // Flatten: parameter p's element i is the number (p, i).
    std::vector<std::vector<std::pair<int, int64_t>>> flats;
    for (const FlatParamPlan& flat : plan.flat_params) {
      flats.emplace_back(flat.padded_numel, std::pair<int, int64_t>{-1, -1});
    }
    for (size_t p = 0; p < plan.params.size(); ++p) {
      for (int64_t i = 0; i < plan.params[p].numel; ++i) {
        flats[plan.params[p].flat_param][plan.params[p].offset + i] = {static_cast<int>(p), i};
      }
    }
    // Shard by segments, gather by metadata.
    std::vector<std::vector<int64_t>> gathered;
    for (const ParamPlan& param : plan.params) {
      gathered.emplace_back(param.numel, -1);
    }
    for (size_t f = 0; f < plan.flat_params.size(); ++f) {
      for (int rank = 0; rank < plan.world_size; ++rank) {
        std::vector<std::pair<int, int64_t>> shard;
        for (const Segment& segment : RankSegments(plan, f, rank)) {
          shard.insert(shard.end(), flats[f].begin() + segment.offset,
                       flats[f].begin() + segment.offset + segment.numel);
        }
        size_t next = 0;
        const absl::StatusOr<ShardMetadata> metadata = GetShardMetadata(plan, f, rank);
        for (const ShardMetadata::Piece& piece : metadata->pieces) {
          for (int64_t i = 0; i < piece.numel; ++i, ++next) {
            ASSERT_LT(next, shard.size());
            ASSERT_EQ(shard[next].first, piece.param);
            gathered[piece.param][piece.first + i] = shard[next].second;
          }
        }
        ASSERT_EQ(next, shard.size());
      }
    }
    for (size_t p = 0; p < plan.params.size(); ++p) {
      for (int64_t i = 0; i < plan.params[p].numel; ++i) {
        ASSERT_EQ(gathered[p][i], i) << plan.params[p].fqn;
      }
    }
  });
}

TEST_F(Property, LookupsLeadFromNameToElementAndBack) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    for (size_t p = 0; p < plan.params.size(); ++p) {
      const ParamPlan& param = plan.params[p];
      ASSERT_EQ(plan.FindParam(param.fqn), static_cast<int>(p));
      for (const std::string& alias : param.aliases) {
        ASSERT_EQ(plan.FindParam("module._fsdp_wrapped_module." + alias), static_cast<int>(p));
      }
      ASSERT_EQ(plan.ParamAt(param.flat_param, param.offset), static_cast<int>(p));
      ASSERT_EQ(plan.ParamAt(param.flat_param, param.offset + param.numel - 1), static_cast<int>(p));
      ASSERT_EQ(plan.groups[param.group].params[param.index_in_group], static_cast<int>(p));
    }
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      ASSERT_EQ(plan.FindGroup(plan.groups[g].name), static_cast<int>(g));
    }
  });
}

bool IsLeftOut(const v1::ModuleTree& tree, int module) {
  for (int m = module; m >= 0; m = tree.modules(m).parent()) {
    if (tree.modules(m).mark() == v1::MODULE_MARK_IGNORED || tree.modules(m).mark() == v1::MODULE_MARK_REPLICATE) {
      return true;
    }
  }
  return false;
}

// An independent walk over the tree: which tensors are managed, and under how many names.
TEST_F(Property, EveryManagedTensorIsStoredOnceInItsNearestGroup) {
  ForAll([](const v1::JobSpec& spec, const ShardPlan& plan) {
    const v1::ModuleTree& tree = spec.tree();
    std::set<uint64_t> left_out_storages;
    for (int m = 0; m < tree.modules_size(); ++m) {
      for (const v1::Parameter& param : tree.modules(m).parameters()) {
        if (IsLeftOut(tree, m) || param.already_sharded()) {
          left_out_storages.insert(param.storage_id());
        }
      }
    }
    left_out_storages.erase(0);
    std::map<int, int> group_of_module;
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      group_of_module[plan.groups[g].module] = static_cast<int>(g);
    }
    std::set<uint64_t> seen_storages;
    size_t names = 0;
    size_t next_param = 0;
    for (int m = 0; m < tree.modules_size(); ++m) {
      if (IsLeftOut(tree, m)) {
        continue;
      }
      int owner = m;
      while (owner >= 0 && group_of_module.count(owner) == 0) {
        owner = tree.modules(owner).parent();
      }
      for (const v1::Parameter& param : tree.modules(m).parameters()) {
        if (param.already_sharded() || left_out_storages.count(param.storage_id()) > 0) {
          continue;
        }
        ++names;
        ASSERT_GE(owner, 0);
        const GroupPlan& user = plan.groups[group_of_module[owner]];
        const std::string fqn = JoinFqn(tree.modules(m).name(), param.name());
        if (param.storage_id() == 0 || seen_storages.insert(param.storage_id()).second) {
          ASSERT_LT(next_param, plan.params.size());
          const ParamPlan& stored = plan.params[next_param++];
          ASSERT_EQ(stored.fqn, fqn) << "parameters come in traversal order";
          ASSERT_EQ(plan.groups[stored.group].name, user.name);
        } else {
          const int holder = plan.params[plan.FindParam(fqn)].group;
          ASSERT_TRUE(plan.groups[holder].name == user.name ||
                      ::testing::Matches(::testing::Contains(holder))(user.also_unshards))
              << fqn << " is used in a group that does not unshard it";
        }
      }
    }
    ASSERT_EQ(next_param, plan.params.size());
    ASSERT_EQ(names, plan.param_by_fqn.size());
  });
}

TEST_F(Property, GroupsComeInPreOrderWithTheirDepth) {
  ForAll([](const v1::JobSpec& spec, const ShardPlan& plan) {
    std::set<int> modules;
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      const GroupPlan& group = plan.groups[g];
      ASSERT_TRUE(g == 0 || group.module > plan.groups[g - 1].module);
      int depth = 0;
      for (int m = spec.tree().modules(group.module).parent(); m >= 0; m = spec.tree().modules(m).parent()) {
        depth += static_cast<int>(modules.count(m));
      }
      ASSERT_EQ(group.depth, depth);
      modules.insert(group.module);
    }
  });
}

// What unshard gives is what the group's own module says, else the job; a group that says nothing is planned as if no
// other did.
TEST_F(Property, EveryGroupHasItsModulesPrecisionOrTheJobs) {
  int own = 0;
  ForAll([&own](const v1::JobSpec& spec, const ShardPlan& plan) {
    int64_t cast_bytes = 0;
    for (const GroupPlan& group : plan.groups) {
      const v1::Module& module = spec.tree().modules(group.module);
      const v1::MixedPrecision& want =
          module.has_mixed_precision() ? module.mixed_precision() : spec.config().mixed_precision();
      own += module.has_mixed_precision() ? 1 : 0;
      ASSERT_EQ(group.mixed_precision.SerializeAsString(), want.SerializeAsString()) << group.name;
      for (int f : group.flat_params) {
        const FlatParamPlan& flat = plan.flat_params[f];
        const bool casts = IsFloatingPoint(flat.dtype) && want.param_dtype() != v1::DTYPE_UNSPECIFIED;
        ASSERT_EQ(flat.unsharded_dtype, casts ? want.param_dtype() : flat.dtype) << group.name;
        const int64_t bytes = flat.padded_numel * DTypeSizeBytes(flat.unsharded_dtype);
        cast_bytes += flat.unsharded_dtype == flat.dtype ? 0 : bytes;
      }
    }
    const bool is_cast_in_the_pool = plan.config.unshard_mode() == v1::UNSHARD_MODE_POOLED &&
                                     plan.config.offload() != v1::OFFLOAD_HOST && !plan.config.pass_copies();
    ASSERT_GE(plan.memory.parameters_bytes, is_cast_in_the_pool ? 0 : cast_bytes);
    if (cast_bytes == 0 && !plan.config.pass_copies()) {
      ASSERT_EQ(plan.memory.parameters_bytes, 0);
    }
    v1::JobSpec without = spec;
    for (v1::Module& module : *without.mutable_tree()->mutable_modules()) module.clear_mixed_precision();
    const absl::StatusOr<ShardPlan> uniform = PlanShards(without);
    ASSERT_TRUE(uniform.ok());
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      if (spec.tree().modules(plan.groups[g].module).has_mixed_precision()) continue;
      ASSERT_EQ(plan.groups[g].unsharded_bytes, uniform->groups[g].unsharded_bytes);
      ASSERT_EQ(plan.groups[g].gradient_bytes, uniform->groups[g].gradient_bytes);
    }
    ASSERT_EQ(plan.memory.gradients_bytes > 0, uniform->memory.gradients_bytes > 0);
  });
  EXPECT_GT(own, 100);
}

// Checks [offset, offset + size) ranges of one slab or slot: aligned, disjoint, within `limit`.
class Ranges {
 public:
  void Add(int64_t offset_bytes, int64_t size_bytes) {
    EXPECT_EQ(offset_bytes % kSlabAlignmentBytes, 0);
    ranges_.insert({offset_bytes, offset_bytes + size_bytes});
  }
  void ExpectDisjointWithin(int64_t limit_bytes) const {
    int64_t end_bytes = 0;
    for (const auto& [begin, end] : ranges_) {
      EXPECT_GE(begin, end_bytes);
      end_bytes = end;
    }
    EXPECT_LE(end_bytes, limit_bytes);
    EXPECT_LE(limit_bytes, end_bytes + kSlabAlignmentBytes) << "more is planned than is used";
  }

 private:
  std::multiset<std::pair<int64_t, int64_t>> ranges_;
};

TEST_F(Property, NothingOverlapsInAnySlabOrSlot) {
  ForAll([](const v1::JobSpec&, const ShardPlan& plan) {
    Ranges shards, parameters, gradients, optimizer;
    std::vector<Ranges> slot_images(plan.groups.size());
    std::vector<Ranges> pool_images(plan.groups.size());
    for (const FlatParamPlan& flat : plan.flat_params) {
      const int64_t unsharded_bytes = flat.padded_numel * DTypeSizeBytes(flat.unsharded_dtype);
      const bool is_pooled = plan.config.unshard_mode() == v1::UNSHARD_MODE_POOLED;
      for (int copy = 0; copy < plan.shard_copies; ++copy) {
        shards.Add(flat.shards_offset_bytes + copy * plan.shards_stride_bytes,
                   flat.padded_numel * DTypeSizeBytes(flat.dtype));
      }
      ASSERT_EQ(flat.pool_offset_bytes >= 0, is_pooled);
      const bool is_cast_at_commit = !is_pooled || plan.config.offload() == v1::OFFLOAD_HOST;
      ASSERT_EQ(flat.params_offset_bytes >= 0,
                plan.config.pass_copies() || (is_cast_at_commit && flat.dtype != flat.unsharded_dtype));
      ASSERT_EQ(plan.staging_bytes > 0 && flat.requires_grad,
                plan.config.offload() == v1::OFFLOAD_HOST && flat.requires_grad);
      ASSERT_EQ(flat.gradients_offset_bytes >= 0, flat.requires_grad);
      ASSERT_EQ(flat.slot_offset_bytes >= 0, flat.requires_grad);
      ASSERT_EQ(flat.optimizer_offset_bytes >= 0, flat.requires_grad && plan.optimizer_states > 0);
      if (is_pooled) {
        pool_images[flat.group].Add(flat.pool_offset_bytes, unsharded_bytes);
      }
      if (flat.params_offset_bytes >= 0) {
        parameters.Add(flat.params_offset_bytes, unsharded_bytes);
      }
      if (flat.requires_grad) {
        for (int copy = 0; copy < plan.gradient_copies; ++copy) {
          gradients.Add(flat.gradients_offset_bytes + copy * plan.gradients_stride_bytes, flat.padded_numel * 4);
        }
        slot_images[flat.group].Add(flat.slot_offset_bytes, unsharded_bytes);
        for (int k = 0; k < plan.optimizer_states * plan.optimizer_copies; ++k) {
          const int64_t copy_bytes = k / plan.optimizer_states * plan.optimizer_stride_bytes;
          optimizer.Add(copy_bytes + flat.optimizer_offset_bytes + k % plan.optimizer_states * flat.StateStrideBytes(),
                        flat.padded_numel * 4);
        }
      }
    }
    shards.ExpectDisjointWithin(plan.memory.shards_bytes);
    parameters.ExpectDisjointWithin(plan.memory.parameters_bytes);
    gradients.ExpectDisjointWithin(plan.memory.gradients_bytes);
    optimizer.ExpectDisjointWithin(plan.memory.optimizer_bytes);
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      slot_images[g].ExpectDisjointWithin(plan.groups[g].gradient_bytes);
      if (plan.config.unshard_mode() == v1::UNSHARD_MODE_POOLED) {
        pool_images[g].ExpectDisjointWithin(plan.groups[g].unsharded_bytes);
        ASSERT_LE(plan.groups[g].unsharded_bytes, plan.pool_slot_bytes);
      }
    }
  });
}

TEST_F(Property, NestedGroupsShareNoGradientSlotAndEachSlotSuffices) {
  ForAll([](const v1::JobSpec& spec, const ShardPlan& plan) {
    std::map<int, int> slot_of_module;
    for (const GroupPlan& group : plan.groups) {
      ASSERT_EQ(group.gradient_slot >= 0, group.gradient_bytes > 0);
      if (group.gradient_slot < 0) {
        continue;
      }
      const SlotPlan& slot = plan.gradient_slots.at(group.gradient_slot);
      ASSERT_GE(slot.size_bytes, group.gradient_bytes);
      for (int m = spec.tree().modules(group.module).parent(); m >= 0; m = spec.tree().modules(m).parent()) {
        ASSERT_TRUE(slot_of_module.count(m) == 0 || slot_of_module[m] != group.gradient_slot);
      }
      slot_of_module[group.module] = group.gradient_slot;
    }
  });
}

// Text of everything in a plan.
std::string Dump(const ShardPlan& plan) {
  std::string text = plan.digest + plan.config.SerializeAsString();
  for (const ParamPlan& p : plan.params) {
    absl::StrAppend(&text, p.fqn, " ", p.group, " ", p.flat_param, " ", p.offset, " ", p.optimizer_group, "\n");
  }
  for (const FlatParamPlan& f : plan.flat_params) {
    absl::StrAppend(&text, f.shards_offset_bytes, " ", f.params_offset_bytes, " ", f.gradients_offset_bytes, " ",
                    f.optimizer_offset_bytes, " ", f.slot_offset_bytes, " ", f.pool_offset_bytes, "\n");
  }
  for (const GroupPlan& g : plan.groups) {
    absl::StrAppend(&text, g.name, " ", g.depth, " ", g.reshard_after_forward, " ", g.gradient_slot, "\n");
  }
  absl::StrAppend(&text, plan.memory.TotalBytes(plan.world_size), " ", plan.pool_slots);
  return text;
}

TEST_F(Property, EqualInputGivesEqualPlansAlsoOverTheWire) {
  ForAll([](const v1::JobSpec& spec, const ShardPlan& plan) {
    v1::JobSpec copy;
    ASSERT_TRUE(copy.ParseFromString(spec.SerializeAsString()));
    const absl::StatusOr<ShardPlan> again = PlanShards(copy);
    ASSERT_TRUE(again.ok());
    ASSERT_EQ(Dump(*again), Dump(plan));
    ASSERT_EQ(plan.digest.size(), 32u);
    ASSERT_EQ(FirstDifference(spec, copy), "");
  });
}

// A wild field anywhere must give a plan or a status, never a crash; the sanitizers watch.
TEST_F(Property, CorruptedSpecsAreRefusedOrPlannedButNeverCrash) {
  const google::protobuf::LogSilencer no_log_of_bad_utf8;
  int refused = 0;
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    RandomSpec random(seed);
    std::string bytes = random.spec().SerializeAsString();
    std::mt19937 noise(seed);
    for (int flips = 1 + static_cast<int>(noise() % 4); flips > 0; --flips) {
      bytes[noise() % bytes.size()] ^= static_cast<char>(1u << (noise() % 8));
    }
    v1::JobSpec spec;
    if (!spec.ParseFromString(bytes) || spec.world_size() > 64) {
      continue;
    }
    const absl::StatusOr<ShardPlan> plan = PlanShards(spec);
    if (!plan.ok()) {
      ++refused;
      ASSERT_TRUE(plan.status().code() == absl::StatusCode::kInvalidArgument ||
                  plan.status().code() == absl::StatusCode::kUnimplemented)
          << plan.status();
      continue;
    }
    for (size_t f = 0; f < plan->flat_params.size(); ++f) {
      (void)RankSegments(*plan, static_cast<int>(f), plan->world_size - 1);
    }
  }
  EXPECT_GT(refused, 0) << "the corruption never hit anything that is checked";
}

}  // namespace
}  // namespace shardd
