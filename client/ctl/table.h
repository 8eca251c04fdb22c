#ifndef SHARDD_CLIENT_CTL_TABLE_H_
#define SHARDD_CLIENT_CTL_TABLE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace shardd::ctl {

// Text for a terminal. Thread-compatible.

enum class Align { kLeft, kRight };
enum class Tone { kPlain, kGood, kWarning, kBad };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

struct Cell {
  Cell(std::string text, Tone tone = Tone::kPlain) : text(std::move(text)), tone(tone) {}  // NOLINT: converts
  Cell(const char* text) : text(text) {}                                                   // NOLINT: converts
  std::string text;
  Tone tone = Tone::kPlain;
};

// Names come from whoever described the model: what could steer the terminal is shown as \xNN.
std::string Printable(absl::string_view text);

// Columns as wide as their widest cell, two spaces between them, none at the end of a line.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // REQUIRES: as many cells as columns.
  void AddRow(std::vector<Cell> cells);
  bool empty() const { return rows_.empty(); }
  // With a newline after each line. `color`: titles bold, tones as ANSI colours.
  std::string Render(bool color) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// "key    value" lines, values in one column.
class KeyValues {
 public:
  void Add(std::string key, Cell value);
  std::string Render(bool color) const;

 private:
  std::vector<std::pair<std::string, Cell>> lines_;
};

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_TABLE_H_
