#include "client/ctl/table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardd::ctl {
namespace {

constexpr char kBold[] = "\x1b[1m";
constexpr char kReset[] = "\x1b[0m";

absl::string_view ColorOf(Tone tone) {
  switch (tone) {
    case Tone::kGood:
      return "\x1b[32m";
    case Tone::kWarning:
      return "\x1b[33m";
    case Tone::kBad:
      return "\x1b[31m";
    case Tone::kPlain:
      break;
  }
  return "";
}

// Characters, not bytes: continuation bytes of UTF-8 take no place.
size_t Width(absl::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

void AppendPadded(const Cell& cell, size_t width, Align align, bool last, bool color, std::string* out) {
  const size_t padding = width - std::min(width, Width(cell.text));
  if (align == Align::kRight) {
    out->append(padding, ' ');
  }
  const absl::string_view tone = color ? ColorOf(cell.tone) : "";
  if (tone.empty()) {
    out->append(cell.text);
  } else {
    absl::StrAppend(out, tone, cell.text, kReset);
  }
  if (align == Align::kLeft && !last) {
    out->append(padding, ' ');
  }
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string printable;
  printable.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    // 0xC2 0x80 to 0xC2 0x9F are control characters too.
    const bool control =
        c < 0x20 || c == 0x7F || (c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0);
    if (control) {
      absl::StrAppendFormat(&printable, "\\x%02x", c);
    } else {
      printable.push_back(text[i]);
    }
  }
  return printable;
}

void Table::AddRow(std::vector<Cell> cells) {
  for (Cell& cell : cells) {
    cell.text = Printable(cell.text);
  }
  rows_.push_back(std::move(cells));
}

std::string Table::Render(bool color) const {
  std::vector<size_t> widths;
  for (size_t i = 0; i < columns_.size(); ++i) {
    size_t width = Width(columns_[i].title);
    for (const std::vector<Cell>& row : rows_) {
      width = std::max(width, Width(row[i].text));
    }
    widths.push_back(width);
  }
  std::string out;
  const auto append_line = [&](const auto& cell_at, bool line_color) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) {
        out.append("  ");
      }
      AppendPadded(cell_at(i), widths[i], columns_[i].align, i + 1 == columns_.size(), line_color, &out);
    }
    // An empty last cell leaves the separator behind.
    while (!out.empty() && out.back() == ' ') {
      out.pop_back();
    }
  };
  if (color) {
    out.append(kBold);
  }
  append_line([&](size_t i) { return Cell(columns_[i].title); }, false);
  if (color) {
    out.append(kReset);
  }
  out.push_back('\n');
  for (const std::vector<Cell>& row : rows_) {
    append_line([&](size_t i) { return row[i]; }, color);
    out.push_back('\n');
  }
  return out;
}

void KeyValues::Add(std::string key, Cell value) {
  value.text = Printable(value.text);
  lines_.emplace_back(std::move(key), std::move(value));
}

std::string KeyValues::Render(bool color) const {
  size_t width = 0;
  for (const auto& [key, value] : lines_) {
    width = std::max(width, Width(key));
  }
  std::string out;
  for (const auto& [key, value] : lines_) {
    AppendPadded(Cell(key), width, Align::kLeft, false, false, &out);
    out.append("  ");
    AppendPadded(value, 0, Align::kLeft, true, color, &out);
    out.push_back('\n');
  }
  return out;
}

}  // namespace shardd::ctl
