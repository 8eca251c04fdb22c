#include "client/c/job/graphs.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/gpu/stream_order.h"
#include "common/status/status_macros.h"

namespace shardd {

void Graphs::OnNewSession() {
  noted_ = nullptr;
  for (const std::unique_ptr<Graph>& graph : graphs_) {
    if (graph != nullptr) {  // of the session that is gone, whose number another daemon may give again
      graph->session_id = 0;
      graph->words = nullptr;
    }
  }
}

absl::Status Graphs::Error(const char* call, absl::string_view what) const {
  return absl::FailedPreconditionError(
      absl::StrCat(call, " job \"", attachment_.plan().job(), "\": ", what, " (rank=", attachment_.rank(), ")"));
}

absl::Status Graphs::CheckNotNoting(const char* call) const {
  return noted_ == nullptr ? absl::OkStatus() : Error(call, "a graph is being noted; call shardd_end_graph first");
}

absl::StatusOr<int> Graphs::Begin() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  if (noted_ != nullptr) {
    return Error("begin_graph", "another graph is being noted; call shardd_end_graph first");
  }
  ClientSession& session = attachment_.session();
  if (!session.stream_waits().ordered()) {
    const absl::Status fallback = session.stream_waits().fallback();
    return Error("begin_graph", fallback.ok() ? "no CUDA stream was named; call shardd_set_cuda_stream first"
                                              : absl::StrCat("order is by the host: ", fallback.message()));
  }
  if (attachment_.plan().pooled()) {
    return Error("begin_graph",
                 "unsharded groups lie elsewhere in every step (got unshardMode POOLED, want ZERO_COPY), and a "
                 "graph's addresses are constants");
  }
  if (attachment_.plan().plan().config.trainer_sums()) {
    return Error("begin_graph",
                 "gradients are added in the trainers (got trainerSums true, want false): a sum for which the graph "
                 "waits could stand behind the graph in a queue of the GPU; open the job with trainerSums false in its "
                 "spec's config");
  }
  SHARDD_ASSIGN_OR_RETURN(GraphWords* const words, session.stream_waits().order()->MakeGraphWords());
  auto graph = std::make_unique<Graph>();
  graph->session_id = session.id();
  graph->words = words;
  graph->handles = handles_.all();
  graph->slot_holders.assign(gradients_.slots(), -1);
  graph->began_closed = graph->last_closed = gradients_.last_closed();
  graphs_.push_back(std::move(graph));
  noted_ = graphs_.back().get();
  return static_cast<int>(graphs_.size()) - 1;
}

absl::Status Graphs::End() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  if (noted_ == nullptr) {
    return Error("end_graph", "no graph is being noted; call shardd_begin_graph first");
  }
  Graph* const graph = std::exchange(noted_, nullptr);
  const std::vector<Handle> after = handles_.Exchange(graph->handles);
  for (size_t i = 0; i < after.size(); ++i) {
    if (!(after[i] == graph->handles[i])) {
      graph->calls.clear();
      return Error("end_graph", absl::StrCat("group \"", attachment_.plan().group_name(static_cast<int>(i)),
                                             "\" ends otherwise than it began (got ", after[i].DebugString(), ", want ",
                                             graph->handles[i].DebugString(),
                                             "), so that no second launch could follow; reshard it, or call "
                                             "shardd_backward_done, within the graph"));
    }
  }
  return absl::OkStatus();
}

absl::Status Graphs::Free(int id) {
  SHARDD_ASSIGN_OR_RETURN(Graph* const graph, Find("free_graph", id));
  if (graph == noted_) {
    return Error("free_graph", "it is being noted; call shardd_end_graph first");
  }
  if (graph->session_id == attachment_.session().id() &&
      !attachment_.session().stream_waits().order()->FreeGraphWords(graph->words)) {
    return Error("free_graph", "a launch is still under way; synchronise the stream first");
  }
  graphs_[static_cast<size_t>(id)] = nullptr;
  return absl::OkStatus();
}

absl::StatusOr<Graphs::Graph*> Graphs::Find(const char* call, int id) const {
  if (id < 0 || id >= static_cast<int>(graphs_.size()) || graphs_[static_cast<size_t>(id)] == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(call, " job \"", attachment_.plan().job(), "\": no such graph (got ",
                                                   id, ", of ", graphs_.size(),
                                                   " that were begun; rank=", attachment_.rank(), ")"));
  }
  return graphs_[static_cast<size_t>(id)].get();
}

absl::Status Graphs::NoteUnshard(int group, HandleEvent event) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(handles_.ApplyWithTied(group, event));
  GraphCall call = {GraphCall::Kind::kUnshard, group};
  call.event = event;
  noted_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status Graphs::NoteWaitUnshard(int group) {
  SHARDD_RETURN_IF_ERROR(unsharding_.CheckAsked(group));
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  GraphCall call = {GraphCall::Kind::kWaitUnshard, group};
  if (!noted_->awaits_version) {  // there is one in a graph: steps lie outside
    SHARDD_ASSIGN_OR_RETURN(call.word, attachment_.session().stream_waits().order()->AddGraphWait(noted_->words));
    noted_->awaits_version = true;
  }
  for (const int other : attachment_.plan().group(group).also_unshards) {
    SHARDD_RETURN_IF_ERROR(handles_.Arrive(other));
  }
  SHARDD_RETURN_IF_ERROR(handles_.Arrive(group));
  noted_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status Graphs::NoteReshard(int group) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(handles_.ApplyWithTied(group, HandleEvent::kReshard));
  noted_->calls.push_back({GraphCall::Kind::kReshard, group});
  return absl::OkStatus();
}

absl::Status Graphs::NoteWaitGradientSlot(int group) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(gradients_.CheckTrains("wait_gradient_slot", group));
  GraphCall call = {GraphCall::Kind::kWaitGradientSlot, group};
  SHARDD_ASSIGN_OR_RETURN(call.word, attachment_.session().stream_waits().order()->AddGraphWait(noted_->words));
  noted_->slot_holders[static_cast<size_t>(attachment_.plan().group(group).gradient_slot)] = group;
  noted_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status Graphs::NoteSubmitGradients(int group, const uint8_t* present, const uint8_t* fresh) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(gradients_.CheckTrains("submit_gradients", group));
  SHARDD_RETURN_IF_ERROR(gradients_.CheckMasks(group, present, fresh));
  const RankPlan& plan = attachment_.plan();
  int& holder = noted_->slot_holders[static_cast<size_t>(plan.group(group).gradient_slot)];
  if (noted_->last_closed || holder != group) {
    return Error("submit_gradients",
                 absl::StrCat("group \"", plan.group_name(group), "\": ",
                              noted_->last_closed
                                  ? "the last backward of the step is closed within the graph"
                                  : "its gradient slot may hold another submission; call "
                                    "shardd_wait_gradient_slot before the gradients are written, within the graph"));
  }
  GraphCall call = {GraphCall::Kind::kSubmitGradients, group};
  const auto mask_bytes = static_cast<size_t>(plan.layout().mask_size_bytes[static_cast<size_t>(group)]);
  if (present != nullptr) call.present.assign(present, present + mask_bytes);
  if (fresh != nullptr) call.fresh.assign(fresh, fresh + mask_bytes);
  SHARDD_RETURN_IF_ERROR(handles_.Apply(group, HandleEvent::kSubmitGradients));
  SHARDD_ASSIGN_OR_RETURN(call.word, attachment_.session().stream_waits().order()->AddGraphSignal(noted_->words));
  holder = -1;
  noted_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status Graphs::NoteBackwardDone(bool last) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  GraphCall call = {GraphCall::Kind::kBackwardDone};
  call.last = last;
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kBackwardDone));
  SHARDD_ASSIGN_OR_RETURN(call.word, attachment_.session().stream_waits().order()->AddGraphSignal(noted_->words));
  noted_->last_closed = last;
  noted_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

}  // namespace shardd
