#include "tests/torch/model.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cmath>
#include <functional>

namespace shardd_test {
namespace {

constexpr int64_t kIn = 7, kWidth = 15, kHidden = 13, kOut = 3, kRows = 4, kTableRows = 11;

// The same values in every process, without torch's generator.
at::Tensor Values(at::IntArrayRef shape, double seed, double scale) {
  at::Tensor values = at::empty(shape, at::kFloat);
  for (int64_t i = 0; i < values.numel(); ++i) {
    values.data_ptr<float>()[i] =
        static_cast<float>(scale * std::sin(12.9898 * static_cast<double>(i + 1) + 78.233 * seed));
  }
  return values;
}

// What torch.utils.checkpoint does: no graph in forward, which runs again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  struct Body : torch::CustomClassHolder {
    std::function<at::Tensor(at::Tensor)> run;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, c10::intrusive_ptr<Body> body) {
    context->save_for_backward({x});
    context->saved_data["body"] = c10::IValue::make_capsule(body);
    return body->run(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto body = c10::static_intrusive_pointer_cast<Body>(context->saved_data["body"].toCapsule());
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode with_graph(true);
    const at::Tensor y = body->run(x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

int next_seed = 1;  // models are made once per process, in the same order

}  // namespace

AffineImpl::AffineImpl(int64_t in, int64_t out, at::Tensor shared) {
  weight = register_parameter("weight", shared.defined() ? shared : Values({out, in}, next_seed++, 0.4));
  bias = register_parameter("bias", Values({out}, next_seed++, 0.1));
}
at::Tensor AffineImpl::forward(at::Tensor x) { return at::linear(x, weight, bias); }

CellImpl::CellImpl(int64_t width, int64_t hidden, at::Tensor shared) {
  a = register_module("a", std::make_shared<AffineImpl>(width, hidden, shared));
  gate =
      register_module("gate", std::make_shared<AffineImpl>(width, hidden, shared.defined() ? a->weight : at::Tensor()));
  b = register_module("b", std::make_shared<AffineImpl>(hidden, width));
  extra = register_module("extra", std::make_shared<AffineImpl>(width, width));
}
at::Tensor CellImpl::forward(at::Tensor x, bool with_extra) {
  at::Tensor y = b->forward(at::tanh(a->forward(x)) * at::sigmoid(gate->forward(x)));
  return with_extra ? x + y + at::tanh(extra->forward(x)) : x + y;
}

TableImpl::TableImpl(int64_t rows, int64_t width) {
  weight = register_parameter("weight", Values({rows, width}, next_seed++, 0.3));
}
at::Tensor TableImpl::forward(at::Tensor index) { return at::embedding(weight, index); }

NetImpl::NetImpl(const std::string& model_kind) : kind(model_kind) {
  in = register_module("in", std::make_shared<AffineImpl>(kIn, kWidth));
  at::Tensor shared = kind == "tied" ? Values({kHidden, kWidth}, 0.5, 0.4).requires_grad_() : at::Tensor();
  for (int i = 0; i < 3; ++i) {
    // Tied: a and gate within a cell, and the first with the last cell.
    cells.push_back(register_module("cell" + std::to_string(i),
                                    std::make_shared<CellImpl>(kWidth, kHidden, i == 1 ? at::Tensor() : shared)));
  }
  if (kind == "towers" || kind == "order") {
    for (int i = 0; i < 3; ++i) {
      tables.push_back(
          register_module("table" + std::to_string(i), std::make_shared<TableImpl>(kTableRows + i, kWidth)));
    }
  }
  if (kind == "absent") {
    unused = register_module("unused", std::make_shared<AffineImpl>(3, 5));
  }
  out = register_module("out", std::make_shared<AffineImpl>(kWidth, kOut));
  if (kind == "frozen") {
    for (at::Tensor& parameter : cells[1]->parameters()) {
      parameter.set_requires_grad(false);
    }
    cells[0]->a->bias.set_requires_grad(false);
    in->weight.set_requires_grad(false);
  }
}

at::Tensor NetImpl::forward(at::Tensor x, at::Tensor index, at::Tensor target, Position at) {
  at::Tensor h = in->forward(x);
  const bool reversed = kind == "order" && at.rank % 2 == 1;
  std::vector<at::Tensor> looked_up(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    const size_t which = reversed ? tables.size() - 1 - i : i;
    looked_up[which] = Call(*tables[which], index);
  }
  for (const at::Tensor& rows : looked_up) {
    h = h + rows;  // in one order, so that sums are equal
  }
  if (kind == "order") {
    // Two cells side by side.
    at::Tensor left, right;
    if (reversed) {
      right = CallCell(*cells[1], h, true);
      left = CallCell(*cells[0], h, true);
    } else {
      left = CallCell(*cells[0], h, true);
      right = CallCell(*cells[1], h, true);
    }
    h = CallCell(*cells[2], left + right, true);
  } else {
    for (size_t i = 0; i < cells.size(); ++i) {
      const bool dropped = kind == "absent" && i == 1 && at.step % 5 == 4;  // by all ranks
      const bool with_extra = kind != "absent" || (i == 0 && (at.step + at.rank) % 2 == 0);
      if (!dropped) {
        h = CallCell(*cells[i], h, with_extra);
      }
    }
  }
  at::Tensor error = out->forward(h).to(at::kFloat) - target;
  return (error * error).mean();
}

at::Tensor NetImpl::CallCell(CellImpl& cell, at::Tensor x, bool with_extra) {
  if (!recompute) {
    return Call(cell, x, with_extra);
  }
  auto body = c10::make_intrusive<Recomputed::Body>();
  body->run = [this, &cell, with_extra](at::Tensor input) { return Call(cell, input, with_extra); };
  return Recomputed::apply(x, body);
}

at::Tensor Penalised(const at::Tensor& loss, const at::Tensor& x, double weight) {
  if (weight == 0) {
    return loss;
  }
  const at::Tensor gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  return loss + weight * gradient.square().sum();
}

Batch MakeBatch(const Position& at, at::ScalarType dtype) {
  const double seed = 1000.0 * at.rank + 10.0 * at.step + at.micro + 0.25;
  Batch batch;
  batch.x = Values({kRows, kIn}, seed, 1.0).to(dtype);
  batch.target = Values({kRows, kOut}, seed + 0.5, 1.0);
  std::vector<int64_t> index;
  for (int64_t row = 0; row < kRows; ++row) {
    index.push_back((row * 3 + at.step + at.rank * 5) % kTableRows);
  }
  batch.index = at::tensor(index, at::kLong);
  return batch;
}

}  // namespace shardd_test
