#include "client/ctl/predict/picture.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace shardd::ctl {
namespace {

constexpr double kLeft = 110;
constexpr double kWidth = 1080;
constexpr double kTop = 40;
constexpr double kRow = 44;
constexpr double kBar = 30;
constexpr const char* kRows[] = {"compute", "unshard", "reduce"};

struct Style {
  const char* text;
  const char* colour;
  int row;
};

Style StyleOf(Span::What what) {
  switch (what) {
    case Span::What::kForward:
      return {"forward", "#4c78a8", 0};
    case Span::What::kBackward:
      return {"backward", "#2f5d8a", 0};
    case Span::What::kUpdate:
      return {"update", "#7a5195", 0};
    case Span::What::kUnshard:
      return {"unshard", "#59a14f", 1};
    case Span::What::kReduce:
      return {"reduce", "#e08214", 2};
  }
  return {"", "#888888", 0};
}

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

}  // namespace

std::string DrawStep(const Prediction& prediction, const ShardPlan& plan, absl::string_view title) {
  const double scale = kWidth / std::max(prediction.step_s, 1e-9);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" font-family=\"sans-serif\" "
      "font-size=\"13\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n<text x=\"10\" y=\"22\">%s</text>\n",
      kLeft + kWidth + 40, kTop + 3 * kRow + 34, Escaped(title));
  for (int row = 0; row < 3; ++row) {
    const double y = kTop + row * kRow;
    absl::StrAppendFormat(&svg,
                          "<text x=\"10\" y=\"%g\">%s</text>\n<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" "
                          "fill=\"#f2f2f2\"/>\n",
                          y + 20, kRows[row], kLeft, y, kWidth, kBar);
  }
  for (const Span& span : prediction.spans) {
    const Style style = StyleOf(span.what);
    const std::string group = span.group < 0 ? "" : plan.groups[static_cast<size_t>(span.group)].name;
    absl::StrAppendFormat(&svg,
                          "<rect x=\"%.2f\" y=\"%g\" width=\"%.2f\" height=\"%g\" fill=\"%s\" stroke=\"#ffffff\" "
                          "stroke-width=\"0.4\"><title>%s %s, %.3f ms</title></rect>\n",
                          kLeft + span.begin_s * scale, kTop + style.row * kRow,
                          std::max(0.3, (span.end_s - span.begin_s) * scale), kBar, style.colour, style.text,
                          Escaped(group), (span.end_s - span.begin_s) * 1e3);
  }
  constexpr int kTicks = 8;
  for (int tick = 0; tick <= kTicks; ++tick) {
    const double seconds = prediction.step_s * tick / kTicks;
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\" fill=\"#555555\">%.3g ms</text>\n",
                          kLeft + seconds * scale, kTop + 3 * kRow + 10, seconds * 1e3);
  }
  return svg + "</svg>\n";
}

}  // namespace shardd::ctl
