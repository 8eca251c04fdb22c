#include "tests/e2e/ranks/report.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace shardd::e2e {
namespace {

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

std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
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

void TrainerReport::AddNote(const std::string& text) { notes.push_back(OneLine(text)); }

void WriteReport(const std::string& folder, int rank, const Status& status, const TrainerReport& report) {
  const std::string path = folder + "/rank." + std::to_string(rank);
  std::ofstream out(path + ".new");
  out << "code " << static_cast<int>(status.code()) << "\nmessage " << OneLine(status.message()) << "\nended_ms "
      << report.ended_ms << '\n';
  out << "waited_ms " << report.waited_ms << '\n';
  WriteVector(out, "stepped_ms", report.stepped_ms);
  WriteVector(out, "losses", report.losses);
  WriteVector(out, "norms", report.norms);
  WriteVector(out, "clips", report.clips);
  for (const std::string& note : report.notes) out << "note " << note << '\n';
  for (const std::string& bits : report.bits) out << "bits " << bits << '\n';
  for (const Tensor& tensor : report.values) WriteVector(out, "param", tensor);
  out.close();
  std::rename((path + ".new").c_str(), path.c_str());
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
    } else if (kind == "ended_ms") {
      line >> report.ended_ms;
    } else if (kind == "waited_ms") {
      line >> report.waited_ms;
    } else if (kind == "stepped_ms") {
      report.stepped_ms = ReadVector<double>(line);
    } else if (kind == "losses") {
      report.losses = ReadVector<double>(line);
    } else if (kind == "norms") {
      report.norms = ReadVector<double>(line);
    } else if (kind == "clips") {
      report.clips = ReadVector<double>(line);
    } else if (kind == "note") {
      report.notes.push_back(text.substr(5));
    } else if (kind == "bits") {
      report.bits.push_back(text.substr(5));
    } else if (kind == "param" && param < kParamCount) {
      report.values[param++] = ReadVector<float>(line);
    }
  }
  return report;
}

}  // namespace shardd::e2e
