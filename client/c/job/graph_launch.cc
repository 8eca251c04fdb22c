// A launch: the calls of a graph, made again while the GPU runs it.

#include <functional>

#include "absl/strings/str_cat.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/job/graphs.h"
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

absl::Status Graphs::CheckLaunch(const Graph& graph) const {
  SHARDD_RETURN_IF_ERROR(CheckNotNoting("launch_graph"));
  if (graph.session_id != attachment_.session().id()) {
    return Error("launch_graph",
                 "it was captured in a session that is over, whose gradient slots are gone; capture it anew");
  }
  if (graph.calls.empty() || !attachment_.session().stream_waits().ordered()) {
    return Error("launch_graph", graph.calls.empty() ? "nothing was noted in it"
                                                     : "no CUDA stream is named; call shardd_set_cuda_stream");
  }
  if (attachment_.ledger().expected_version() == 0) {
    return Error("launch_graph", "the parameters have no values yet (version 0); call shardd_commit_parameters");
  }
  if (gradients_.last_closed() != graph.began_closed) {
    return Error("launch_graph", gradients_.last_closed()
                                     ? "the last backward of this step is closed; call shardd_step first"
                                     : "it was begun behind the last backward of a step");
  }
  const std::vector<Handle>& now = handles_.all();
  for (size_t i = 0; i < now.size(); ++i) {
    if (!(now[i] == graph.handles[i])) {
      return Error("launch_graph", absl::StrCat("group \"", attachment_.plan().group_name(static_cast<int>(i)),
                                                "\" is not as it was when the graph was begun (got ",
                                                now[i].DebugString(), ", want ", graph.handles[i].DebugString(), ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status Graphs::Launch(int id, void* exec) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_ASSIGN_OR_RETURN(Graph* const graph, Find("launch_graph", id));
  SHARDD_RETURN_IF_ERROR(CheckLaunch(*graph));
  if (attachment_.plan().trainers_write()) {
    SHARDD_RETURN_IF_ERROR(passes_.CheckReading(absl::StrCat("launch_graph job \"", attachment_.plan().job(), "\"")));
  }
  ClientSession& session = attachment_.session();
  StreamOrder* const order = session.stream_waits().order();
  SHARDD_RETURN_IF_ERROR(order->LaunchGraph(static_cast<CUgraphExec>(exec), graph->words));
  session.stream_waits().set_waits_on_host(true);
  absl::Status status;
  for (const GraphCall& call : graph->calls) {
    status = Replay(call, graph->words);
    if (!status.ok()) break;
  }
  session.stream_waits().set_waits_on_host(false);
  const auto slice = [this] { return attachment_.interrupt().Check("launch_graph"); };
  if (status.ok()) {
    status = order->AwaitLaunch(slice);
  }
  if (status.ok()) {
    order->EndGraph();
    return status;
  }
  session.Close();                  // the graph, half of whose calls were made, is let go, and what it computes is void
  (void)order->AwaitLaunch(slice);  // the program may drop the graph then
  return attachment_.Note(absl::Status(status.code(), absl::StrCat("launch_graph: ", status.message())));
}

absl::Status Graphs::Replay(const GraphCall& call, GraphWords* words) {
  ClientSession& session = attachment_.session();
  const WaitFor reason{NameOf(call.kind), call.group < 0 ? nullptr : &attachment_.plan().group_name(call.group),
                       "the graph's stream to come there"};
  const auto go_on = [&session, on = session.waits().GoOn(reason)]() -> absl::Status {
    SHARDD_RETURN_IF_ERROR(session.stream_waits().order()->launch_status());
    return on();
  };
  switch (call.kind) {
    case Kind::kUnshard:
      return unsharding_.Unshard(call.group, call.event);
    case Kind::kWaitUnshard:
      SHARDD_RETURN_IF_ERROR(unsharding_.Wait(call.group));
      return call.word < 0 ? absl::OkStatus() : words->Release(call.word, go_on);
    case Kind::kReshard:
      return unsharding_.Reshard(call.group);
    case Kind::kWaitGradientSlot:
      SHARDD_RETURN_IF_ERROR(gradients_.WaitSlot(call.group));
      return words->Release(call.word, go_on);
    case Kind::kSubmitGradients:
      SHARDD_RETURN_IF_ERROR(words->Await(call.word, go_on));
      return gradients_.Submit(call.group, call.present.empty() ? nullptr : call.present.data(),
                               call.fresh.empty() ? nullptr : call.fresh.data());
    case Kind::kBackwardDone:
      SHARDD_RETURN_IF_ERROR(words->Await(call.word, go_on));
      return gradients_.BackwardDone(call.last);
  }
  return absl::OkStatus();
}

}  // namespace shardd
