// What ranks ask of gradients beside their commands.

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/daemon/core.h"
#include "server/job/job_core.h"
#include "server/session/session.h"

namespace shardd {

void AnswerOthersGradients(Core* core, PeerCredentials peer, v1::OthersGradientsRequest request,
                           JobsSource::Done<v1::OthersGradientsResponse> done) {
  core->loop_.Post([core, peer, request = std::move(request), done = std::move(done)] {
    JobCore* job = nullptr;
    Session* session = core->FindSession(request.session_id(), &job);
    if (session == nullptr || session->token() != request.token() || session->peer.uid != peer.uid) {
      done(absl::UnauthenticatedError(
          absl::StrCat("others' gradients: session ", request.session_id(), ": no such session, or wrong token")));
      return;
    }
    v1::OthersGradientsResponse response;
    for (const int param : job->GivenByOthers(*session, request.since())) {
      response.add_params(param);
    }
    done(std::move(response));
  });
}

}  // namespace shardd
