#include "tests/e2e/trainer.h"

#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "tests/e2e/reference.h"

#define RETURN_IF_ERROR(expression)                     \
  do {                                                  \
    if (Status status_ = (expression); !status_.ok()) { \
      return status_;                                   \
    }                                                   \
  } while (false)

namespace shardd::e2e {
namespace {

constexpr int64_t kPauseLimitMs = 120'000;

void SleepMs(int64_t ms) {
  const timespec time = {ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&time, nullptr);
}

int IndexOf(const char* const* names, int count, const std::string& name) {
  for (int i = 0; i < count; ++i) {
    if (name == names[i]) return i;
  }
  std::fprintf(stderr, "trainer: unknown name %s\n", name.c_str());
  std::_Exit(2);
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

template <typename T>
void WriteVector(std::ofstream& out, const char* name, const std::vector<T>& values) {
  out << name << ' ' << values.size();
  char text[40];
  for (const T& value : values) {
    std::snprintf(text, sizeof(text), " %a", static_cast<double>(value));  // every bit
    out << text;
  }
  out << '\n';
}

template <typename T>
std::vector<T> ReadVector(std::stringstream& line) {
  size_t size = 0;
  line >> size;
  std::vector<T> values;
  for (std::string text; values.size() < size && line >> text;) {
    values.push_back(static_cast<T>(std::strtod(text.c_str(), nullptr)));
  }
  return values;
}

}  // namespace

int64_t NowMs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

std::string TrainerReport::Note(const std::string& prefix) const {
  for (const std::string& note : notes) {
    if (note.compare(0, prefix.size(), prefix) == 0) return note;
  }
  return "";
}

TrainerReport ReadReport(const std::string& folder, int rank) {
  TrainerReport report;
  std::ifstream file(folder + "/rank." + std::to_string(rank));
  int param = 0;
  for (std::string text; std::getline(file, text);) {
    std::stringstream line(text);
    std::string kind;
    line >> kind;
    if (kind == "code") {
      line >> report.code;
    } else if (kind == "message") {
      report.message = text.size() > 8 ? text.substr(8) : "";
    } else if (kind == "losses") {
      report.losses = ReadVector<double>(line);
    } else if (kind == "norms") {
      report.norms = ReadVector<double>(line);
    } else if (kind == "clips") {
      report.clips = ReadVector<double>(line);
    } else if (kind == "note") {
      report.notes.push_back(text.substr(5));
    } else if (kind == "param" && param < kParamCount) {
      report.values[param++] = ReadVector<float>(line);
    }
  }
  return report;
}

Trainer::Trainer(const Args& args)
    : args_(args),
      folder_(args.Text("folder")),
      dtype_(args.Text("param_dtype", "fp32")),
      rank_(args.Int("rank")),
      seen_(Zeros()),
      gradient_(Zeros()) {
  const int steps = args_.Int("steps", 50);
  report_.losses.assign(steps, 0.0);
  report_.norms.assign(steps, 0.0);
  report_.clips.assign(steps, 0.0);
  for (const std::string& name : Split(args_.Text("order"), ',')) {
    order_.push_back(IndexOf(kGroupNames, kGroupCount, name == "root" ? "(root)" : name));
  }
}

int Trainer::Run() {
  if (const int delay_us = args_.Int("kill_after_us"); delay_us > 0) {
    // Whatever the process does then: a timer's signal kills it.
    const timer_t timer = [] {
      sigevent event = {};
      event.sigev_notify = SIGEV_SIGNAL;
      event.sigev_signo = SIGKILL;
      timer_t made = nullptr;
      timer_create(CLOCK_MONOTONIC, &event, &made);
      return made;
    }();
    const itimerspec when = {{0, 0}, {delay_us / 1'000'000, delay_us % 1'000'000 * 1000}};
    timer_settime(timer, 0, &when, nullptr);
  }
  Status status = Attach();
  while (status.ok()) {
    status = Train();
    if (!status.aborted() || args_.Int("recover") == 0) {
      break;
    }
    Note("aborted " + std::to_string(job_->info().committed_step) + " " + std::to_string(NowMs()) + " " +
         status.message());
    status = job_->Reattach();
    if (!status.ok()) {
      break;
    }
    Note("state " + job_->trainer_state().substr(0, 64));
  }
  if (status.ok()) {
    status = Finish();
  }
  WriteReport(status);
  return 0;
}

Status Trainer::Attach() {
  Job::Options options;
  std::ifstream spec(args_.Text("spec"));
  options.spec_json.assign(std::istreambuf_iterator<char>(spec), std::istreambuf_iterator<char>());
  options.rank = rank_;
  options.address = args_.Text("address");
  options.replace = args_.Int("replace") != 0;
  options.timeout_ms = args_.Int("timeout_ms", 120'000);
  RETURN_IF_ERROR(Job::Attach(options, &job_));
  for (int p = 0; p < kParamCount; ++p) {
    param_[p] = job_->FindParameter(kParamNames[p]);
  }
  for (int g = 0; g < kGroupCount; ++g) {
    group_[g] = job_->FindGroup(kGroupNames[g]);
    raf_[g] = job_->group(group_[g]).info().reshard_after_forward != 0;
  }
  Note("attached " + std::to_string(job_->info().committed_step));
  if (!job_->trainer_state().empty()) {
    Note("state " + job_->trainer_state().substr(0, 64));
  }
  if (args_.Int("orphan") != 0 && fork() == 0) {
    // Holds sockets and descriptors of its parent until the test ends it (its process group).
    while (true) pause();
  }
  return Status();
}

Status Trainer::Initialize() {
  const Values values = InitialValues();
  const int world = job_->info().world_size;
  for (int p = rank_; p < kParamCount; p += world) {  // together, each its part
    const int half = kNumel[p] / 2;
    RETURN_IF_ERROR(job_->WriteParameter(param_[p], values[p].data(), 0, half));
    Moment("initial", 0);
    RETURN_IF_ERROR(job_->WriteParameter(param_[p], values[p].data() + half, half, kNumel[p] - half));
  }
  return job_->CommitParameters();
}

Status Trainer::Train() {
  if (job_->info().version == 0) {
    RETURN_IF_ERROR(Initialize());
  }
  const int steps = args_.Int("steps", 50);
  const int64_t first = job_->info().committed_step;
  const std::string want = "step " + std::to_string(first) + " rank " + std::to_string(rank_) + ";";
  const std::string state = job_->trainer_state();
  if (first > 0 && state.compare(0, want.size(), want) != 0) {
    return Status(Code::kDataLoss, "trainer state is of another step (got " + state.substr(0, 64) + ", want " + want);
  }
  for (int64_t step = first; step < steps; ++step) {
    RETURN_IF_ERROR(TrainStep(step));
  }
  if (first < steps) {
    RETURN_IF_ERROR(job_->WaitStep());
  }
  if (args_.Int("writeback_at_end") != 0) {
    RETURN_IF_ERROR(Writeback(steps));
  }
  if (args_.Int("read_values", 1) == 0) {
    return Status();
  }
  return job_->UnshardParams(false, [&] {
    Moment("reading", steps);
    for (int p = 0; p < kParamCount; ++p) {
      const float* data = static_cast<const float*>(job_->full_parameter_data(param_[p]));
      report_.values[p].assign(data, data + kNumel[p]);
    }
  });
}

// Adds one to every element of mid.b1 (each rank its part) as a commit of its own.
Status Trainer::Writeback(int64_t step) {
  Status inner;
  Status status = job_->UnshardParams(true, [&] {
    const float* data = static_cast<const float*>(job_->full_parameter_data(param_[kB1]));
    const int world = job_->info().world_size;
    for (int i = rank_; i < kNumel[kB1] && inner.ok(); i += world) {
      const float value = data[i] + 1;
      inner = job_->WriteParameter(param_[kB1], &value, i, 1);
      Moment("writeback", step);
    }
  });
  return inner.ok() ? status : inner;
}

Status Trainer::TrainStep(int64_t step) {
  const int micros = args_.Int("micro", 1);
  report_.losses[step] = 0;
  for (int micro = 0; micro < micros; ++micro) {
    RETURN_IF_ERROR(ForwardBackward(step, micro, micro + 1 == micros));
  }
  std::vector<shardd_hyperparameters> groups;
  const bool two = args_.Int("two_groups") != 0;
  for (int g = 0; g < (two ? 2 : 1); ++g) {
    const Hyper h = HyperOf(args_, g);
    groups.push_back({h.lr, h.weight_decay, h.beta1, h.beta2, h.eps, h.momentum, h.dampening, h.nesterov ? 1 : 0});
  }
  std::string state = "step " + std::to_string(step + 1) + " rank " + std::to_string(rank_) + ";";
  state.resize(std::max<size_t>(state.size(), args_.Int("state_bytes")), 'x');
  Moment("before_step", step);
  RETURN_IF_ERROR(job_->Step(groups, args_.Double("max_norm"), state));
  Moment("step_sent", step);
  if (args_.Double("max_norm") > 0 || args_.Int("wait_step") != 0) {
    shardd_step_result result = {};
    result.struct_size = sizeof(result);
    RETURN_IF_ERROR(job_->WaitStep(&result));
    report_.norms[step] = result.grad_norm;
    report_.clips[step] = result.clip_factor;
  }
  return Status();
}

void Trainer::ReadParam(int param) {
  const void* data = job_->parameter_data(param_[param]);
  for (int i = 0; i < kNumel[param]; ++i) {
    const uint16_t* half = static_cast<const uint16_t*>(data);
    seen_[param][i] = dtype_ == "bf16"   ? tensor::Bf16ToFloat(half[i])
                      : dtype_ == "fp16" ? tensor::HalfToFloat(half[i])
                                         : static_cast<const float*>(data)[i];
  }
}

Status Trainer::ReadGroup(int group, shardd_phase phase, bool hold) {
  ParameterGroup handle = job_->group(group_[group]);
  RETURN_IF_ERROR(handle.Unshard(phase));
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] == group || (group == kHead && p == kEmbed)) ReadParam(p);
  }
  return hold ? Status() : handle.Reshard();
}

Status Trainer::Release(int group) { return job_->group(group_[group]).Reshard(); }

Status Trainer::Submit(int group, int64_t step, int micro) {
  if (At("skip", kGroupNames[group], step)) {
    return Status();
  }
  ParameterGroup handle = job_->group(group_[group]);
  RETURN_IF_ERROR(handle.WaitGradientSlot());
  uint8_t present = 0, fresh = 0;
  const shardd_group_info info = handle.info();
  for (int p = 0; p < kParamCount; ++p) {
    if (kGroupOfParam[p] != group || !IsPresent(args_.Text("absent"), rank_, step, p)) {
      continue;
    }
    for (int bit = 0; bit < info.param_count; ++bit) {
      if (info.params[bit] != param_[p]) continue;
      present = static_cast<uint8_t>(present | (1u << bit));
      if (IsFresh(args_.Text("fresh"), micro, p)) fresh = static_cast<uint8_t>(fresh | (1u << bit));
    }
    void* slot = job_->gradient_data(param_[p]);
    for (int i = 0; i < kNumel[p]; ++i) {
      if (dtype_ == "bf16") {
        static_cast<uint16_t*>(slot)[i] = tensor::FloatToBf16(gradient_[p][i]);
      } else if (dtype_ == "fp16") {
        static_cast<uint16_t*>(slot)[i] = tensor::FloatToHalf(gradient_[p][i]);
      } else {
        static_cast<float*>(slot)[i] = gradient_[p][i];
      }
    }
  }
  const bool masks = !args_.Text("absent").empty() || !args_.Text("fresh").empty();
  return handle.SubmitGradients(masks ? &present : nullptr, masks ? &fresh : nullptr);
}

Status Trainer::ForwardBackward(int64_t step, int micro, bool last) {
  if (!order_.empty()) {
    RETURN_IF_ERROR(OutOfOrder(step, micro));
    return job_->BackwardDone(last);
  }
  Pass pass(MakeBatch(rank_, step, micro));
  gradient_ = Zeros();
  RETURN_IF_ERROR(ReadGroup(kRoot, SHARDD_FORWARD, /*hold=*/true));
  RETURN_IF_ERROR(ReadGroup(kEmbedGroup, SHARDD_FORWARD, !raf_[kEmbedGroup]));
  pass.ForwardEmbed(seen_[kEmbed]);
  RETURN_IF_ERROR(ReadGroup(kMid, SHARDD_FORWARD, true));
  Moment("unsharded", step);
  ReadParam(kW1);  // once more, as it is now
  pass.ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]);
  if (raf_[kMid]) RETURN_IF_ERROR(Release(kMid));
  RETURN_IF_ERROR(ReadGroup(kHead, SHARDD_FORWARD, !raf_[kHead]));
  pass.ForwardHead(seen_[kEmbed], seen_[kU]);
  report_.losses[step] += pass.Loss(seen_[kBias], seen_[kGain]) / std::max(1, args_.Int("micro", 1));
  if (raf_[kRoot]) {
    RETURN_IF_ERROR(Release(kRoot));
    RETURN_IF_ERROR(ReadGroup(kRoot, SHARDD_BACKWARD, true));
  }
  pass.BackwardRoot(seen_[kGain], gradient_);
  if (raf_[kHead]) RETURN_IF_ERROR(ReadGroup(kHead, SHARDD_BACKWARD, true));
  pass.BackwardHead(seen_[kEmbed], seen_[kU], gradient_);
  RETURN_IF_ERROR(Submit(kHead, step, micro));
  RETURN_IF_ERROR(Release(kHead));
  Moment("some_gradients", step);
  if (raf_[kMid]) RETURN_IF_ERROR(ReadGroup(kMid, SHARDD_BACKWARD, true));
  pass.BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], gradient_);
  RETURN_IF_ERROR(Submit(kMid, step, micro));
  RETURN_IF_ERROR(Release(kMid));
  if (raf_[kEmbedGroup]) RETURN_IF_ERROR(ReadGroup(kEmbedGroup, SHARDD_BACKWARD, true));
  pass.BackwardEmbed(gradient_);
  RETURN_IF_ERROR(Submit(kEmbedGroup, step, micro));
  RETURN_IF_ERROR(Release(kEmbedGroup));
  Moment("root_held", step);
  const Tensor bias = seen_[kBias];
  ReadParam(kBias);  // still unsharded since forward: the version of this pass, whoever has stepped meanwhile
  if (bias != seen_[kBias]) {
    return Status(Code::kDataLoss, "the root's parameters changed within a pass");
  }
  RETURN_IF_ERROR(Submit(kRoot, step, micro));
  RETURN_IF_ERROR(Release(kRoot));
  return job_->BackwardDone(last);
}

Status Trainer::OutOfOrder(int64_t step, int micro) {
  for (int group : order_) RETURN_IF_ERROR(ReadGroup(group, SHARDD_FORWARD, /*hold=*/false));
  Pass pass(MakeBatch(rank_, step, micro));
  gradient_ = Zeros();
  pass.ForwardEmbed(seen_[kEmbed]);
  pass.ForwardMid(seen_[kW1], seen_[kB1], seen_[kFrozen], seen_[kW2]);
  pass.ForwardHead(seen_[kEmbed], seen_[kU]);
  report_.losses[step] += pass.Loss(seen_[kBias], seen_[kGain]) / std::max(1, args_.Int("micro", 1));
  pass.BackwardRoot(seen_[kGain], gradient_);
  pass.BackwardHead(seen_[kEmbed], seen_[kU], gradient_);
  pass.BackwardMid(seen_[kW1], seen_[kFrozen], seen_[kW2], gradient_);
  pass.BackwardEmbed(gradient_);
  for (int group : order_) {
    RETURN_IF_ERROR(ReadGroup(group, SHARDD_BACKWARD, /*hold=*/false));
    RETURN_IF_ERROR(Submit(group, step, micro));
  }
  return Status();
}

Status Trainer::Finish() {
  Moment("end", args_.Int("steps", 50));
  if (args_.Int("finish", 1) == 0) {
    job_.reset();  // detaches; the job is kept
    return Status();
  }
  return job_->Finish();
}

bool Trainer::At(const std::string& what, const std::string& name, int64_t step) const {
  const std::string text = args_.Text(what);
  const size_t at = text.find('@');
  return !text.empty() && text.substr(0, at) == name &&
         (at == std::string::npos || std::atoll(text.c_str() + at + 1) == step);
}

void Trainer::Moment(const std::string& name, int64_t step) {
  if (At("kill", name, step)) {
    std::ofstream(folder_ + "/killed." + std::to_string(rank_)) << NowMs();
    kill(getpid(), SIGKILL);
  }
  if (At("pause", name, step)) {
    const std::string place = name + "." + std::to_string(rank_);
    std::ofstream(folder_ + "/at." + place).flush();
    const int64_t end = NowMs() + kPauseLimitMs;
    while (access((folder_ + "/go." + place).c_str(), F_OK) != 0 && NowMs() < end) {
      SleepMs(1);
    }
  }
}

void Trainer::Note(const std::string& text) {
  std::string line = text;
  for (char& c : line) c = c == '\n' ? ' ' : c;
  report_.notes.push_back(line);
}

void Trainer::WriteReport(const Status& status) const {
  const std::string path = folder_ + "/rank." + std::to_string(rank_);
  std::ofstream out(path + ".new");
  std::string message = status.message();
  for (char& c : message) c = c == '\n' ? ' ' : c;
  out << "code " << static_cast<int>(status.code()) << "\nmessage " << message << '\n';
  WriteVector(out, "losses", report_.losses);
  WriteVector(out, "norms", report_.norms);
  WriteVector(out, "clips", report_.clips);
  for (const std::string& note : report_.notes) out << "note " << note << '\n';
  for (const Tensor& tensor : report_.values) WriteVector(out, "param", tensor);
  out.close();
  std::rename((path + ".new").c_str(), path.c_str());
}

}  // namespace shardd::e2e
