// What ranks ask of gradients beside their commands.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/core.h"
#include "server/job/job_core.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {

namespace {

constexpr int kMostQuestions = 8;  // of a session; its library has one, and gRPC may not be done with those before

}  // namespace

void AnswerOthersGradients(Core* core, PeerCredentials peer, v1::OthersGradientsRequest request,
                           std::shared_ptr<std::shared_ptr<void>> held,
                           JobsSource::Done<v1::OthersGradientsResponse> done) {
  core->loop_.Post([core, peer, request = std::move(request), held = std::move(held), done = std::move(done)] {
    const std::string what = absl::StrCat("others' gradients: session ", request.session_id());
    JobCore* job = nullptr;
    Session* session = core->FindSession(request.session_id(), &job);
    Core::Entry* const entry = session == nullptr ? nullptr : core->FindEntryOf(*job);
    if (entry == nullptr || session->stream == nullptr || session->token() != request.token() ||
        session->peer.uid != peer.uid) {
      done(absl::UnauthenticatedError(absl::StrCat(what, ": no such session, or wrong token")));
      return;
    }
    // Each answer may name all parameters, and waits in the daemon for its reader.
    if (session->stream->questions.use_count() > kMostQuestions) {
      done(absl::ResourceExhaustedError(absl::StrCat(what, ": too many questions are under way or their answers not ",
                                                     "read (want at most ", kMostQuestions,
                                                     "); wait for the answer of one")));
      return;
    }
    *held = session->stream->questions;
    // In the job's turns: it takes time that grows with the plan.
    auto answer = std::make_shared<absl::StatusOr<v1::OthersGradientsResponse>>(
        absl::UnauthenticatedError(absl::StrCat(what, ": it has ended")));
    auto pending = std::make_shared<Core::PendingBatch>();
    pending->session_id = request.session_id();
    pending->ask = [answer, since = request.since()](JobCore& asked, const Session& of) {
      v1::OthersGradientsResponse response;
      const std::vector<int> params = asked.GivenByOthers(of, since);
      response.mutable_params()->Add(params.begin(), params.end());
      *answer = std::move(response);
    };
    pending->done = [answer, done] { done(std::move(*answer)); };
    entry->batches.Add(std::move(pending));
  });
}

}  // namespace shardd
