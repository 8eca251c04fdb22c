#include "tests/server/device/kernel_data.h"

namespace shardd::cuda {
namespace {

// Where an update's ranges lie and what they are.
struct UpdateCase {
  DType param = v1::DTYPE_FLOAT32;
  DType cast = v1::DTYPE_UNSPECIFIED;  // unspecified: no copy
  int64_t numel = 1000;
  int p_offset = 0, g_offset = 0, m_offset = 0, v_offset = 0, cast_offset = 0;
};
std::ostream& operator<<(std::ostream& out, const UpdateCase& c) {
  return out << DTypeName(c.param) << " with " << DTypeName(c.cast) << ", " << c.numel << " at " << c.p_offset << " "
             << c.g_offset << " " << c.m_offset << " " << c.v_offset << " " << c.cast_offset;
}

class KernelUpdateTest : public KernelTest {
 protected:
  // A second moment is never negative; a few are not finite.
  static Elements SecondMoments(int64_t numel) {
    Elements v = Values(v1::DTYPE_FLOAT32, numel, 4);
    for (int64_t i = 0; i < numel; ++i) v.floats()[i] = std::fabs(v.floats()[i]);
    return v;
  }
  void AdamW(const AdamWParams& params, const UpdateCase& c) {
    SCOPED_TRACE(::testing::Message() << "adamw of " << c);
    Elements p = Values(c.param, c.numel, 1), g = Values(v1::DTYPE_FLOAT32, c.numel, 2);
    Elements m = Values(v1::DTYPE_FLOAT32, c.numel, 3), v = SecondMoments(c.numel);
    const bool has_cast = c.cast != v1::DTYPE_UNSPECIFIED;
    Elements cast = MakeElements(has_cast ? c.cast : v1::DTYPE_FLOAT32, c.numel);
    const Buffer pb(*runner_, p, c.p_offset), gb(*runner_, g, c.g_offset), mb(*runner_, m, c.m_offset);
    const Buffer vb(*runner_, v, c.v_offset), cb(*runner_, cast, c.cast_offset);
    runner_->Launch(AdamWArgs{MakeAdamWScalars(params), c.param, pb.data(), gb.floats(), mb.floats(), vb.floats(),
                              has_cast ? cb.data() : nullptr, c.cast, c.numel});
    AdamWUpdate(params, p.data(), c.param, g.floats(), m.floats(), v.floats(), has_cast ? cast.data() : nullptr, c.cast,
                c.numel);
    ExpectSame(pb.Get(), p, Nan::kAnyNan);
    ExpectSame(mb.Get(), m, Nan::kAnyNan);
    ExpectSame(vb.Get(), v, Nan::kAnyNan);
    ExpectSame(cb.Get(), cast, Nan::kAnyNan);
    ExpectSame(gb.Get(), g, Nan::kSameBits);
  }
  void Sgd(const SgdParams& params, const UpdateCase& c) {
    SCOPED_TRACE(::testing::Message() << "sgd of " << c << ", momentum " << params.momentum << " nesterov "
                                      << params.nesterov << " first " << params.first_step);
    Elements p = Values(c.param, c.numel, 1), g = Values(v1::DTYPE_FLOAT32, c.numel, 2);
    Elements buf = Values(v1::DTYPE_FLOAT32, c.numel, 3);
    const bool has_cast = c.cast != v1::DTYPE_UNSPECIFIED, has_buf = params.momentum != 0;
    Elements cast = MakeElements(has_cast ? c.cast : v1::DTYPE_FLOAT32, c.numel);
    const Buffer pb(*runner_, p, c.p_offset), gb(*runner_, g, c.g_offset), bb(*runner_, buf, c.m_offset);
    const Buffer cb(*runner_, cast, c.cast_offset);
    runner_->Launch(SgdArgs{MakeSgdScalars(params), params.nesterov, params.first_step, c.param, pb.data(), gb.floats(),
                            has_buf ? bb.floats() : nullptr, has_cast ? cb.data() : nullptr, c.cast, c.numel});
    SgdUpdate(params, p.data(), c.param, g.floats(), has_buf ? buf.floats() : nullptr, has_cast ? cast.data() : nullptr,
              c.cast, c.numel);
    ExpectSame(pb.Get(), p, Nan::kAnyNan);
    ExpectSame(bb.Get(), buf, Nan::kAnyNan);
    ExpectSame(cb.Get(), cast, Nan::kAnyNan);
    ExpectSame(gb.Get(), g, Nan::kSameBits);
  }
  void Rule(UpdateRule rule, const UpdateCase& c) {
    SCOPED_TRACE(::testing::Message() << UpdateRuleName(rule) << " of " << c);
    RuleParams params;
    params.rule = rule;
    params.lr = 1e-2, params.weight_decay = 0.1, params.eps = 1e-8, params.beta1 = 0.9, params.beta2 = 0.95;
    params.momentum = 0.8, params.lr_decay = 0.1, params.step = 3, params.grad_scale = 0.37;
    Elements p = Values(c.param, c.numel, 1), g = Values(v1::DTYPE_FLOAT32, c.numel, 2);
    Elements a = SecondMoments(c.numel), b = Values(v1::DTYPE_FLOAT32, c.numel, 3);
    const bool has_cast = c.cast != v1::DTYPE_UNSPECIFIED, has_second = UpdateRuleStates(rule) == 2;
    Elements cast = MakeElements(has_cast ? c.cast : v1::DTYPE_FLOAT32, c.numel);
    const Buffer pb(*runner_, p, c.p_offset), gb(*runner_, g, c.g_offset), ab(*runner_, a, c.m_offset);
    const Buffer bb(*runner_, b, c.v_offset), cb(*runner_, cast, c.cast_offset);
    runner_->Launch(RuleArgs{MakeRuleScalars(params), static_cast<RuleNumber>(rule), c.param, pb.data(), gb.floats(),
                             ab.floats(), has_second ? bb.floats() : nullptr, has_cast ? cb.data() : nullptr, c.cast,
                             c.numel});
    RuleUpdateWith(rule, MakeRuleScalars(params), p.data(), c.param, g.floats(), a.floats(),
                   has_second ? b.floats() : nullptr, has_cast ? cast.data() : nullptr, c.cast, c.numel);
    ExpectSame(pb.Get(), p, Nan::kAnyNan);
    ExpectSame(ab.Get(), a, Nan::kAnyNan);
    ExpectSame(bb.Get(), b, Nan::kAnyNan);
    ExpectSame(cb.Get(), cast, Nan::kAnyNan);
  }
};

const AdamWParams kAdamW = {1e-2, 0.9, 0.999, 1e-8, 1e-2, 3, 0.37, false};
constexpr DType kCasts[] = {v1::DTYPE_UNSPECIFIED, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16,
                            v1::DTYPE_FLOAT64};

TEST_F(KernelUpdateTest, AdamWGivesTheBitsOfTheCpu) {
  for (const DType param : kTrainable) {
    for (const DType cast : kCasts) {
      AdamW(kAdamW, {.param = param, .cast = cast, .numel = 5003});
      AdamWParams adam = kAdamW;
      adam.coupled_decay = true;
      adam.step = 1;
      AdamW(adam, {.param = param, .cast = cast});
    }
  }
  AdamW({0.1, 0.5, 0.75, 0, 0, 1000000, 1}, {});  // eps 0, corrections gone
}

TEST_F(KernelUpdateTest, SgdGivesTheBitsOfTheCpu) {
  for (const DType param : kTrainable) {
    for (const DType cast : kCasts) {
      for (const double momentum : {0.0, 0.9}) {
        for (const bool nesterov : {false, true}) {
          for (const bool first : {false, true}) {
            if (momentum == 0 && (nesterov || first)) continue;
            Sgd({0.05, momentum, 0.5, 0.1, nesterov, first, 0.37}, {.param = param, .cast = cast, .numel = 1003});
          }
        }
      }
    }
  }
}

TEST_F(KernelUpdateTest, RulesGiveTheBitsOfTheCpu) {
  for (int rule = 0; rule < kUpdateRules; ++rule) {
    for (const DType param : kTrainable) {
      for (const DType cast : {v1::DTYPE_UNSPECIFIED, v1::DTYPE_BFLOAT16}) {
        Rule(static_cast<UpdateRule>(rule), {.param = param, .cast = cast, .numel = 1003});
        Rule(static_cast<UpdateRule>(rule),
             {.param = param, .cast = cast, .numel = 61, .p_offset = 1, .g_offset = 2, .m_offset = 3, .v_offset = 1});
      }
    }
  }
}

TEST_F(KernelUpdateTest, RangesMayHaveAnyLengthAndAlignment) {
  const SgdParams sgd = {0.05, 0.9, 0.5, 0.1, true, false, 0.37};
  for (const DType param : kTrainable) {
    for (int64_t numel = 1; numel <= 20; ++numel) {
      const UpdateCase c = {.param = param, .cast = v1::DTYPE_BFLOAT16, .numel = numel};
      AdamW(kAdamW, c);
      Sgd(sgd, c);
    }
    for (int i = 0; i < 64; ++i) {
      const UpdateCase c = {.param = param,
                            .cast = v1::DTYPE_BFLOAT16,
                            .numel = 61,
                            .p_offset = i % 4,
                            .g_offset = i / 4 % 4,
                            .m_offset = i / 16 % 4,
                            .v_offset = i * 7 / 4 % 4,
                            .cast_offset = i % 5};
      AdamW(kAdamW, c);
      Sgd(sgd, c);
    }
  }
}

}  // namespace
}  // namespace shardd::cuda
