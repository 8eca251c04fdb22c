// The rank whose forwards and backwards are a CUDA graph.

#include "tests/e2e/ranks/attach.h"
#include "tests/e2e/ranks/stream_trainer.h"

namespace shardd::e2e {

Status StreamTrainer::Capture() {
  if (captures_++ == 0) {  // what a program meets that knows nothing of this
    gpu_->BeginCapture(streams_[current_]);
    refused_ = job_->BackwardDone(true).message();
    gpu_->DropGraph(gpu_->EndCapture(streams_[current_]));
  }
  bodies_.clear();
  captured_.clear();
  const int micros = args_.Int("micro", 1);
  RETURN_IF_ERROR(job_->BeginGraph(&graph_));
  gpu_->BeginCapture(streams_[current_]);
  capturing_ = true;
  Status status;
  for (int micro = 0; micro < micros && status.ok(); ++micro) {
    captured_.push_back(std::make_unique<Backward>(rank_, 0, micro));
    status = ForwardBackward(captured_.back().get(), micro + 1 == micros);
  }
  capturing_ = false;
  if (status.ok()) status = job_->EndGraph();
  exec_ = gpu_->EndCapture(streams_[current_]);
  return status;
}

Status StreamTrainer::Launch(int64_t step) {
  if (exec_ == nullptr) RETURN_IF_ERROR(Capture());
  Kernel([this, step] {  // what a program copies into a graph's inputs
    for (const std::unique_ptr<Backward>& at : captured_) {
      at->step = step;
      at->pass = Pass(MakeBatch(rank_, step, at->micro));
      at->gradient = Zeros();
    }
  });
  moments_.Reach("launch", step);
  return job_->LaunchGraph(graph_, exec_);
}

}  // namespace shardd::e2e
