#include "client/ctl/views.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/ctl/format.h"
#include "client/ctl/table.h"
#include "common/versions/versions.h"

namespace shardd::ctl {
namespace {

std::string Age(int64_t unix_ms, const View& view) {
  return FormatMillis(std::max<int64_t>(0, absl::ToUnixMillis(view.now) - unix_ms));
}

std::string OrDash(std::string text) { return text.empty() ? "-" : text; }
const char* YesNo(bool yes) { return yes ? "yes" : "no"; }

Cell StateCell(v1::JobState state) {
  const Tone tone = state == v1::JOB_STATE_WAITING || state == v1::JOB_STATE_TAKING_UP ? Tone::kWarning
                    : state == v1::JOB_STATE_CLOSED                                    ? Tone::kBad
                                                                                       : Tone::kGood;
  return Cell(ShortEnumName(state), tone);
}

Cell StateCell(v1::RankState state) {
  const Tone tone = state == v1::RANK_STATE_ABSENT      ? Tone::kBad
                    : state == v1::RANK_STATE_ATTACHING ? Tone::kWarning
                                                        : Tone::kGood;
  return Cell(ShortEnumName(state), tone);
}

// What does not happen in an undisturbed run stands out once it has happened.
Cell CountCell(uint64_t count, Tone tone = Tone::kWarning) {
  return Cell(absl::StrCat(count), count == 0 ? Tone::kPlain : tone);
}

template <typename Enum>
std::string OrDefault(Enum value, absl::string_view otherwise) {
  return static_cast<int>(value) == 0 ? std::string(otherwise) : ShortEnumName(value);
}

void AddConfig(const v1::JobConfig& config, KeyValues* out) {
  out->Add("strategy", OrDefault(config.strategy(), "full_shard"));
  if (config.shard_groups_size() > 0) {
    out->Add("shard groups", absl::StrJoin(config.shard_groups(), " ", [](std::string* text, const auto& group) {
               absl::StrAppend(text, "[", absl::StrJoin(group.ranks(), " "), "]");
             }));
  }
  if (config.has_placement()) {
    out->Add("placement", absl::StrCat("parameters ", ShortEnumName(config.placement().parameters()), ", gradients ",
                                       ShortEnumName(config.placement().gradients()), ", optimizer ",
                                       ShortEnumName(config.placement().optimizer())));
  }
  out->Add("layout", OrDefault(config.layout(), "flat"));
  out->Add("unshard", OrDefault(config.unshard_mode(), "zero_copy"));
  out->Add("param dtype", absl::StrCat(OrDefault(config.mixed_precision().param_dtype(), "as stored"),
                                       config.mixed_precision().float8_gathers() ? ", gathered in float8" : ""));
  out->Add("reduce dtype", OrDefault(config.mixed_precision().reduce_dtype(), "as submitted"));
  out->Add("optimizer", OrDefault(config.optimizer().kind(), "none"));
  out->Add("prefetch", absl::StrCat("forward ", YesNo(config.forward_prefetch()), ", backward ",
                                    OrDefault(config.backward_prefetch(), "pre")));
  out->Add("gradients divided by", config.gradient_divide_factor() == 0
                                       ? std::string("world size")
                                       : absl::StrCat(config.gradient_divide_factor()));
  out->Add("strict order", YesNo(config.strict_order()));
  out->Add("missing contribution", config.allow_missing_contribution() ? "counts as none" : "is an error");
}

void AddCounters(const v1::Counters& counters, KeyValues* out) {
  out->Add("commands", absl::StrCat(counters.commands()));
  out->Add("unshards", absl::StrCat(counters.unshards(), ", of these copied ", counters.unshard_copies()));
  out->Add("prefetches", absl::StrCat(counters.prefetches(), ", of these used ", counters.prefetch_hits()));
  out->Add("reshards", absl::StrCat(counters.reshards()));
  out->Add("gradients",
           absl::StrCat(counters.gradient_submissions(), " submitted, ", counters.reductions(), " reductions, ",
                        FormatMiB(static_cast<int64_t>(counters.bytes_reduced())), " read"));
  out->Add("early folds", absl::StrCat(counters.early_folds()));
  out->Add("commits", absl::StrCat(counters.commits(), ", ", FormatMiB(static_cast<int64_t>(counters.bytes_updated())),
                                   " updated"));
  out->Add("aborts", CountCell(counters.aborts(), Tone::kBad));
  out->Add("departures", CountCell(counters.departures()));
  out->Add("attaches", absl::StrCat(counters.attaches()));
}

std::string FormatShape(const v1::ParameterInfo& parameter) {
  return absl::StrCat("[", absl::StrJoin(parameter.shape(), ", "), "]");
}

// Elements of the parameter in each rank's shard: "512 512 0".
std::string FormatShards(const v1::ParameterInfo& parameter) {
  return absl::StrJoin(parameter.shards(), " ",
                       [](std::string* out, const v1::ShardRange& shard) { absl::StrAppend(out, shard.numel()); });
}

Cell NodeStateCell(const v1::Node& node) {
  return Cell(OrDash(node.state()), node.state() == "up" ? Tone::kGood : Tone::kBad);
}

std::string ShowNodes(const v1::Job& job, const View& view) {
  Table table({{"NODE", Align::kRight},
               {"ADDRESS"},
               {"SENT", Align::kRight},
               {"RECEIVED", Align::kRight},
               {"HERE"},
               {"STATE"}});
  for (const v1::Node& node : job.nodes()) {
    table.AddRow({absl::StrCat(node.index()), node.address(), FormatMiB(node.bytes_sent()),
                  FormatMiB(node.bytes_received()), YesNo(node.here()), NodeStateCell(node)});
  }
  return table.Render(view.color);
}

// Of all nodes as this one sees them: "2, 1 down".
Cell NodesCell(const v1::Job& job) {
  const auto down =
      std::count_if(job.nodes().begin(), job.nodes().end(), [](const v1::Node& node) { return node.state() != "up"; });
  return down == 0 ? Cell(absl::StrCat(job.nodes_size()))
                   : Cell(absl::StrCat(job.nodes_size(), ", ", down, " down"), Tone::kBad);
}

}  // namespace

std::string Show(const v1::Daemon& daemon, const std::string& address, const View& view) {
  KeyValues out;
  const VersionRange protocols = {daemon.oldest_protocol_version(), daemon.protocol_version()};
  out.Add("daemon", absl::StrCat("shardd ", daemon.version(), ", protocol ",
                                 protocols.oldest == 0 ? absl::StrCat(protocols.newest) : protocols.Text()));
  out.Add("address", address);
  out.Add("pid", absl::StrCat(daemon.pid()));
  if (!daemon.peer_address().empty()) {
    out.Add("other nodes reach it at", daemon.peer_address());
  }
  out.Add("up", Age(daemon.start_time_unix_ms(), view));
  out.Add("devices", absl::StrJoin(daemon.devices(), " "));
  for (const v1::Gpu& gpu : daemon.gpus()) {
    out.Add(gpu.device(),
            absl::StrCat(gpu.description(), ", at ", OrDash(gpu.pci_bus_id()), ", MPS ", gpu.mps(),
                         ", persistence mode ", gpu.persistence_mode(), ", compute mode ", gpu.compute_mode()));
  }
  if (!daemon.collective().empty()) {
    out.Add("gradients between GPUs", daemon.collective());
  }
  out.Add("jobs", absl::StrCat(daemon.jobs()));
  out.Add("slabs", FormatMiB(daemon.slab_bytes()));
  out.Add("huge pages", OrDash(daemon.huge_pages()));
  out.Add("isolation", OrDash(daemon.isolation()));
  out.Add("handover", OrDash(daemon.handover()));
  out.Add("embedded", daemon.embedded() ? "yes: ends after its last job" : "no");
  for (const std::string& warning : daemon.warnings()) {
    out.Add("warning", Cell(warning, Tone::kWarning));
  }
  return out.Render(view.color);
}

std::string Show(const v1::ListJobsResponse& jobs, const View& view) {
  if (jobs.jobs().empty()) {
    return "no jobs\n";
  }
  Table table({{"JOB"},
               {"STATE"},
               {"RANKS", Align::kRight},
               {"STEP", Align::kRight},
               {"EPOCH", Align::kRight},
               {"GROUPS", Align::kRight},
               {"PARAMETERS", Align::kRight},
               {"SLABS", Align::kRight},
               {"ABORTS", Align::kRight},
               {"DEPARTURES", Align::kRight},
               {"UID", Align::kRight},
               {"AGE", Align::kRight}});
  for (const v1::Job& job : jobs.jobs()) {
    const bool complete = job.attached_ranks() == job.world_size();
    table.AddRow(
        {job.name(), StateCell(job.state()),
         Cell(absl::StrCat(job.attached_ranks(), "/", job.world_size()), complete ? Tone::kPlain : Tone::kWarning),
         absl::StrCat(job.committed_step()), absl::StrCat(job.epoch()), absl::StrCat(job.groups()),
         FormatNumel(job.parameters_numel()), FormatMiB(job.slab_bytes()),
         CountCell(job.counters().aborts(), Tone::kBad), CountCell(job.counters().departures()),
         absl::StrCat(job.uid()), Age(job.created_unix_ms(), view)});
  }
  return table.Render(view.color);
}

std::string Show(const v1::Job& job, const View& view) {
  KeyValues out;
  out.Add("job", absl::StrCat(job.name(), " (id ", job.job_id(), ", uid ", job.uid(),
                              job.has_secret() ? ", with a secret)" : ")"));
  out.Add("state", StateCell(job.state()));
  out.Add("ranks", absl::StrCat(job.attached_ranks(), " of ", job.world_size(), " attached",
                                job.nodes().empty() ? "" : ", on this node"));
  if (!job.nodes().empty()) {
    out.Add("nodes", NodesCell(job));
  }
  out.Add("committed step", absl::StrCat(job.committed_step()));
  out.Add("version", absl::StrCat(job.version()));
  out.Add("epoch", absl::StrCat(job.epoch()));
  out.Add("parameters", absl::StrCat(FormatNumel(job.parameters_numel()), " in ", job.groups(), " groups"));
  out.Add("slabs", FormatMiB(job.slab_bytes()));
  out.Add("age", Age(job.created_unix_ms(), view));
  out.Add("plan digest", OrDash(job.plan_digest()));
  out.Add("gradients added by", OrDash(job.collective()));
  AddConfig(job.config(), &out);
  AddCounters(job.counters(), &out);
  std::string text = out.Render(view.color);
  if (!job.nodes().empty()) {
    absl::StrAppend(&text, "\n", ShowNodes(job, view));
  }
  return text;
}

std::string Show(const v1::ListRanksResponse& ranks, const View& view) {
  Table table({{"RANK", Align::kRight},
               {"STATE"},
               {"DEVICE"},
               {"PID", Align::kRight},
               {"COMMANDS", Align::kRight},
               {"DEPARTURES", Align::kRight},
               {"AGE", Align::kRight},
               {"LAST COMMAND"},
               {"WAITING FOR"}});
  Table handles({{"RANK", Align::kRight}, {"GROUP"}, {"STORAGE"}, {"TRAINING"}});
  for (const v1::Rank& rank : ranks.ranks()) {
    table.AddRow({absl::StrCat(rank.rank()), StateCell(rank.state()),
                  rank.stream_ordered() ? absl::StrCat(rank.device(), ", by stream") : OrDash(rank.device()),
                  rank.pid() == 0 ? std::string("-") : absl::StrCat(rank.pid()), absl::StrCat(rank.commands()),
                  CountCell(rank.departures()),
                  rank.last_command().empty() ? std::string("-") : FormatMillis(rank.last_command_age_ms()),
                  OrDash(rank.last_command()), OrDash(rank.waiting_for())});
    for (const v1::HandleStatus& handle : rank.handles()) {
      handles.AddRow({absl::StrCat(rank.rank()), handle.group(), handle.storage_state(), handle.training_state()});
    }
  }
  std::string text = table.Render(view.color);
  if (view.handles) {
    absl::StrAppend(&text, "\n", handles.Render(view.color));
  }
  return text;
}

std::string Show(const v1::ListGroupsResponse& groups, const View& view) {
  Table table({{"INDEX", Align::kRight},
               {"GROUP"},
               {"PARAMETERS", Align::kRight},
               {"NUMEL", Align::kRight},
               {"PADDED", Align::kRight},
               {"SHARD", Align::kRight},
               {"DTYPE"},
               {"TRAINED"},
               {"RESHARD"},
               {"GRADIENT SLOT", Align::kRight},
               {"ALSO UNSHARDS"}});
  for (const v1::Group& group : groups.groups()) {
    int64_t shard_numel = 0;
    int trained = 0;
    std::set<std::string> dtypes;
    for (const v1::FlatParam& flat : group.flat_params()) {
      shard_numel += flat.shard_numel();
      trained += flat.requires_grad() ? 1 : 0;
      const bool cast = static_cast<int>(flat.unsharded_dtype()) != 0 && flat.unsharded_dtype() != flat.dtype();
      dtypes.insert(absl::StrCat(ShortEnumName(flat.dtype()), cast ? " as " : "",
                                 cast ? ShortEnumName(flat.unsharded_dtype()) : ""));
    }
    table.AddRow({absl::StrCat(group.index()),
                  std::string(2 * static_cast<size_t>(std::max(0, group.depth())), ' ') + group.name(),
                  absl::StrCat(group.parameters()), absl::StrCat(group.numel()), absl::StrCat(group.padded_numel()),
                  absl::StrCat(shard_numel), OrDash(absl::StrJoin(dtypes, " ")),
                  trained == 0                          ? "no"
                  : trained == group.flat_params_size() ? "yes"
                                                        : "partly",
                  group.reshard_after_forward() ? "after forward" : "after backward",
                  group.gradient_slot() < 0 ? std::string("-") : absl::StrCat(group.gradient_slot()),
                  OrDash(absl::StrJoin(group.also_unshards(), " "))});
  }
  return table.Render(view.color);
}

std::string Show(const v1::ListParametersResponse& parameters, const View& view) {
  Table table({{"PARAMETER"},
               {"SHAPE"},
               {"DTYPE"},
               {"TRAINED"},
               {"GROUP"},
               {"OFFSET", Align::kRight},
               {"OPTIMIZER GROUP", Align::kRight},
               {"NUMEL PER RANK"},
               {"TIED TO"}});
  for (const v1::ParameterInfo& parameter : parameters.parameters()) {
    table.AddRow({parameter.fqn(), FormatShape(parameter), ShortEnumName(parameter.dtype()),
                  YesNo(parameter.requires_grad()), parameter.group(), absl::StrCat(parameter.offset_numel()),
                  absl::StrCat(parameter.optimizer_group()), FormatShards(parameter),
                  OrDash(absl::StrJoin(parameter.aliases(), " "))});
  }
  return table.Render(view.color);
}

namespace {

// "cuda:0 24.0 MiB, cuda:1 22.0 MiB" where it lies on several GPUs.
std::string FormatPlace(const v1::Purpose& purpose) {
  if (purpose.devices_size() < 2) return OrDash(purpose.backing());
  return absl::StrJoin(purpose.devices(), ", ", [](std::string* out, const v1::DeviceBytes& entry) {
    absl::StrAppend(out, entry.device(), " ", FormatMiB(entry.allocated_bytes()));
  });
}

}  // namespace

std::string Show(const v1::Memory& memory, const View& view) {
  Table table({{"PURPOSE"}, {"PLANNED", Align::kRight}, {"ALLOCATED", Align::kRight}, {"BACKING"}});
  for (const v1::Purpose& purpose : memory.purposes()) {
    table.AddRow({purpose.purpose(), FormatMiB(purpose.planned_bytes()), FormatMiB(purpose.allocated_bytes()),
                  FormatPlace(purpose)});
  }
  table.AddRow({"total", FormatMiB(memory.planned_bytes()), FormatMiB(memory.allocated_bytes()), ""});
  return table.Render(view.color);
}

std::string Show(const v1::ListStreamsResponse& streams, const View& view) {
  Table table({{"DEVICE"},
               {"STREAM"},
               {"SUBMITTED", Align::kRight},
               {"DONE", Align::kRight},
               {"QUEUED", Align::kRight},
               {"BUSY", Align::kRight},
               {"NOW"}});
  for (const v1::Stream& stream : streams.streams()) {
    const uint64_t queued = stream.submitted() - std::min(stream.submitted(), stream.done());
    table.AddRow({stream.device(), stream.name(), absl::StrCat(stream.submitted()), absl::StrCat(stream.done()),
                  absl::StrCat(queued), FormatMicros(stream.busy_us()), OrDash(stream.current())});
  }
  return table.Render(view.color);
}

std::string Show(const v1::ListEventsResponse& events, const View& view) {
  if (events.events().empty()) {
    return "no events\n";
  }
  Table table({{"TIME"},
               {"JOB"},
               {"EPOCH", Align::kRight},
               {"STEP", Align::kRight},
               {"RANK", Align::kRight},
               {"KIND"},
               {"TEXT"}});
  for (const v1::Event& event : events.events()) {
    const Tone tone = event.kind() == "abort" || event.kind() == "lost" || event.kind() == "refused" ? Tone::kBad
                      : event.kind() == "departure"                                                  ? Tone::kWarning
                                                                                                     : Tone::kPlain;
    table.AddRow({FormatTimeMicros(event.unix_us()), OrDash(event.job()), absl::StrCat(event.epoch()),
                  absl::StrCat(event.step()), event.rank() < 0 ? std::string("-") : absl::StrCat(event.rank()),
                  Cell(event.kind(), tone), event.text()});
  }
  return table.Render(view.color);
}

}  // namespace shardd::ctl
