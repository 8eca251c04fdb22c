#include "client/c/client_graph.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using Kind = GraphCall::Kind;

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kUnshard:
      return "unshard";
    case Kind::kWaitUnshard:
      return "wait_unshard";
    case Kind::kReshard:
      return "reshard";
    case Kind::kWaitGradientSlot:
      return "wait_gradient_slot";
    case Kind::kSubmitGradients:
      return "submit_gradients";
    case Kind::kBackwardDone:
      return "backward_done";
  }
  return "";
}

}  // namespace

absl::Status ClientJob::GraphError(const char* call, absl::string_view what) const {
  return absl::FailedPreconditionError(
      absl::StrCat(call, " job \"", spec().name(), "\": ", what, " (rank=", rank(), ")"));
}

absl::StatusOr<int> ClientJob::BeginGraph() {
  SHARDD_RETURN_IF_ERROR(Live());
  if (recording_ != nullptr) {
    return GraphError("begin_graph", "another graph is being noted; call shardd_end_graph first");
  }
  if (!session_->stream_ordered()) {
    const absl::Status fallback = session_->stream_fallback();
    return GraphError("begin_graph", fallback.ok() ? "no CUDA stream was named; call shardd_set_cuda_stream first"
                                                   : absl::StrCat("order is by the host: ", fallback.message()));
  }
  if (pooled()) {
    return GraphError("begin_graph",
                      "unsharded groups lie elsewhere in every step (got unshardMode POOLED, want ZERO_COPY), and a "
                      "graph's addresses are constants");
  }
  if (plan_.config.trainer_sums()) {
    return GraphError(
        "begin_graph",
        "gradients are added in the trainers (got trainerSums true, want false): a sum for which the graph "
        "waits could stand behind the graph in a queue of the GPU; open the job with trainerSums false in its spec's "
        "config");
  }
  SHARDD_ASSIGN_OR_RETURN(GraphWords* const words, session_->stream_order()->MakeGraphWords());
  auto graph = std::make_unique<JobGraph>();
  graph->session_id = session_->id();
  graph->words = words;
  graph->handles = progress_.handles;
  graph->slot_holders.assign(progress_.slots.size(), -1);
  graph->began_closed = graph->last_closed = progress_.last_closed;
  graphs_.push_back(std::move(graph));
  recording_ = graphs_.back().get();
  return static_cast<int>(graphs_.size()) - 1;
}

absl::Status ClientJob::EndGraph() {
  SHARDD_RETURN_IF_ERROR(Live());
  if (recording_ == nullptr) {
    return GraphError("end_graph", "no graph is being noted; call shardd_begin_graph first");
  }
  JobGraph* const graph = std::exchange(recording_, nullptr);
  const std::vector<Handle> after = std::exchange(progress_.handles, graph->handles);
  for (size_t i = 0; i < after.size(); ++i) {
    if (!(after[i] == graph->handles[i])) {
      graph->calls.clear();
      return GraphError("end_graph", absl::StrCat("group \"", group_name(static_cast<int>(i)),
                                                  "\" ends otherwise than it began (got ", after[i].DebugString(),
                                                  ", want ", graph->handles[i].DebugString(),
                                                  "), so that no second launch could follow; reshard it, or call "
                                                  "shardd_backward_done, within the graph"));
    }
  }
  return absl::OkStatus();
}

absl::Status ClientJob::FreeGraph(int id) {
  SHARDD_ASSIGN_OR_RETURN(JobGraph* const graph, FindGraph("free_graph", id));
  if (graph == recording_) {
    return GraphError("free_graph", "it is being noted; call shardd_end_graph first");
  }
  if (session_ != nullptr && graph->session_id == session_->id() &&
      !session_->stream_order()->FreeGraphWords(graph->words)) {
    return GraphError("free_graph", "a launch is still under way; synchronise the stream first");
  }
  graphs_[static_cast<size_t>(id)] = nullptr;
  return absl::OkStatus();
}

absl::StatusOr<JobGraph*> ClientJob::FindGraph(const char* call, int id) const {
  if (id < 0 || id >= static_cast<int>(graphs_.size()) || graphs_[static_cast<size_t>(id)] == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(call, " job \"", spec().name(), "\": no such graph (got ", id,
                                                   ", of ", graphs_.size(), " that were begun; rank=", rank(), ")"));
  }
  return graphs_[static_cast<size_t>(id)].get();
}

absl::Status ClientJob::NoteUnshard(int index, HandleEvent event) {
  SHARDD_RETURN_IF_ERROR(ApplyWithTied(index, event));
  GraphCall call = {Kind::kUnshard, index};
  call.event = event;
  recording_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ClientJob::NoteWaitUnshard(int index) {
  GraphCall call = {Kind::kWaitUnshard, index};
  if (!recording_->awaits_version) {  // there is one in a graph: steps lie outside
    SHARDD_ASSIGN_OR_RETURN(call.word, session_->stream_order()->AddGraphWait(recording_->words));
    recording_->awaits_version = true;
  }
  const auto arrive = [this](int of) {
    return handle(of).storage() == StorageState::kUnsharding
               ? handle(of).Apply(HandleEvent::kUnshardDone, group_name(of), rank())
               : absl::OkStatus();
  };
  for (const int other : group(index).also_unshards) {
    SHARDD_RETURN_IF_ERROR(arrive(other));
  }
  SHARDD_RETURN_IF_ERROR(arrive(index));
  recording_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ClientJob::NoteReshard(int index) {
  SHARDD_RETURN_IF_ERROR(ApplyWithTied(index, HandleEvent::kReshard));
  recording_->calls.push_back({Kind::kReshard, index});
  return absl::OkStatus();
}

absl::Status ClientJob::NoteWaitGradientSlot(int index) {
  GraphCall call = {Kind::kWaitGradientSlot, index};
  SHARDD_ASSIGN_OR_RETURN(call.word, session_->stream_order()->AddGraphWait(recording_->words));
  recording_->slot_holders[static_cast<size_t>(group(index).gradient_slot)] = index;
  recording_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ClientJob::NoteSubmitGradients(int index, const uint8_t* present, const uint8_t* fresh) {
  int& holder = recording_->slot_holders[static_cast<size_t>(group(index).gradient_slot)];
  if (recording_->last_closed || holder != index) {
    return GraphError(
        "submit_gradients",
        absl::StrCat("group \"", group_name(index), "\": ",
                     recording_->last_closed
                         ? "the last backward of the step is closed within the graph"
                         : "its gradient slot may hold another submission; call "
                           "shardd_wait_gradient_slot before the gradients are written, within the graph"));
  }
  GraphCall call = {Kind::kSubmitGradients, index};
  const auto mask_bytes = static_cast<size_t>(layout_.mask_size_bytes[static_cast<size_t>(index)]);
  if (present != nullptr) call.present.assign(present, present + mask_bytes);
  if (fresh != nullptr) call.fresh.assign(fresh, fresh + mask_bytes);
  SHARDD_RETURN_IF_ERROR(handle(index).Apply(HandleEvent::kSubmitGradients, group_name(index), rank()));
  SHARDD_ASSIGN_OR_RETURN(call.word, session_->stream_order()->AddGraphSignal(recording_->words));
  holder = -1;
  recording_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ClientJob::NoteBackwardDone(bool last) {
  GraphCall call = {Kind::kBackwardDone};
  call.last = last;
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kBackwardDone));
  SHARDD_ASSIGN_OR_RETURN(call.word, session_->stream_order()->AddGraphSignal(recording_->words));
  recording_->last_closed = last;
  recording_->calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ClientJob::CheckLaunch(const JobGraph& graph) const {
  if (recording_ != nullptr) {
    return GraphError("launch_graph", "a graph is being noted; call shardd_end_graph first");
  }
  if (graph.session_id != session_->id()) {
    return GraphError("launch_graph",
                      "it was captured in a session that is over, whose gradient slots are gone; capture it anew");
  }
  if (graph.calls.empty() || !session_->stream_ordered()) {
    return GraphError("launch_graph", graph.calls.empty() ? "nothing was noted in it"
                                                          : "no CUDA stream is named; call shardd_set_cuda_stream");
  }
  if (expected_version_ == 0) {
    return GraphError("launch_graph", "the parameters have no values yet (version 0); call shardd_commit_parameters");
  }
  if (progress_.last_closed != graph.began_closed) {
    return GraphError("launch_graph", progress_.last_closed
                                          ? "the last backward of this step is closed; call shardd_step first"
                                          : "it was begun behind the last backward of a step");
  }
  for (size_t i = 0; i < progress_.handles.size(); ++i) {
    if (!(progress_.handles[i] == graph.handles[i])) {
      return GraphError("launch_graph", absl::StrCat("group \"", group_name(static_cast<int>(i)),
                                                     "\" is not as it was when the graph "
                                                     "was begun (got ",
                                                     progress_.handles[i].DebugString(), ", want ",
                                                     graph.handles[i].DebugString(), ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status ClientJob::LaunchGraph(int id, void* exec) {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_ASSIGN_OR_RETURN(JobGraph* const graph, FindGraph("launch_graph", id));
  SHARDD_RETURN_IF_ERROR(CheckLaunch(*graph));
  if (!plan_.config.trainers_never_write()) {
    SHARDD_RETURN_IF_ERROR(ReadAgain(absl::StrCat("launch_graph job \"", spec().name(), "\"")));
  }
  StreamOrder* const order = session_->stream_order();
  SHARDD_RETURN_IF_ERROR(order->LaunchGraph(static_cast<cu::GraphExec>(exec), graph->words));
  session_->set_waits_on_host(true);
  absl::Status status;
  for (const GraphCall& call : graph->calls) {
    status = Replay(call, graph->words);
    if (!status.ok()) break;
  }
  session_->set_waits_on_host(false);
  const auto slice = [this] { return interrupt_.Check("launch_graph"); };
  if (status.ok()) {
    status = order->AwaitLaunch(slice);
  }
  if (status.ok()) {
    order->EndGraph();
    return status;
  }
  session_->Close();                // the graph, half of whose calls were made, is let go, and what it computes is void
  (void)order->AwaitLaunch(slice);  // the program may drop the graph then
  return Note(absl::Status(status.code(), absl::StrCat("launch_graph: ", status.message())));
}

absl::Status ClientJob::Replay(const GraphCall& call, GraphWords* words) {
  const WaitFor reason{NameOf(call.kind), call.group < 0 ? nullptr : &group_name(call.group),
                       "the graph's stream to come there"};
  const auto go_on = [this, on = session_->GoOn(reason)]() -> absl::Status {
    SHARDD_RETURN_IF_ERROR(session_->stream_order()->launch_status());
    return on();
  };
  switch (call.kind) {
    case Kind::kUnshard:
      return Unshard(call.group, call.event);
    case Kind::kWaitUnshard:
      SHARDD_RETURN_IF_ERROR(WaitUnshard(call.group));
      return call.word < 0 ? absl::OkStatus() : words->Release(call.word, go_on);
    case Kind::kReshard:
      return Reshard(call.group);
    case Kind::kWaitGradientSlot:
      SHARDD_RETURN_IF_ERROR(WaitGradientSlot(call.group));
      return words->Release(call.word, go_on);
    case Kind::kSubmitGradients:
      SHARDD_RETURN_IF_ERROR(words->Await(call.word, go_on));
      return SubmitGradients(call.group, call.present.empty() ? nullptr : call.present.data(),
                             call.fresh.empty() ? nullptr : call.fresh.data());
    case Kind::kBackwardDone:
      SHARDD_RETURN_IF_ERROR(words->Await(call.word, go_on));
      return BackwardDone(call.last);
  }
  return absl::OkStatus();
}

}  // namespace shardd
