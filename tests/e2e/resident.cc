#include "tests/e2e/resident.h"

#include <fstream>
#include <map>
#include <sstream>

namespace shardd::e2e {
namespace {

// "Name:   12 kB" lines, in bytes.
std::map<std::string, int64_t> ReadTable(const std::string& path) {
  std::map<std::string, int64_t> table;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kib = 0;
    if (fields >> name >> kib && !name.empty() && name.back() == ':') {
      table[name.substr(0, name.size() - 1)] = kib * 1024;
    }
  }
  return table;
}

}  // namespace

Resident ReadResident(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  std::map<std::string, int64_t> rollup = ReadTable(proc + "/smaps_rollup");
  std::map<std::string, int64_t> status = ReadTable(proc + "/status");
  Resident resident;
  resident.anonymous_bytes = rollup["Pss_Anon"];
  resident.file_pss_bytes = rollup["Pss_File"];
  resident.shared_pss_bytes = rollup["Pss_Shmem"];
  resident.shared_bytes = status["RssShmem"];
  resident.peak_bytes = status["VmHWM"];
  return resident;
}

std::ostream& operator<<(std::ostream& out, const Resident& r) {
  return out << r.anonymous_bytes << " anonymous, " << r.file_pss_bytes << " of files, " << r.shared_pss_bytes << " of "
             << r.shared_bytes << " shared, peak " << r.peak_bytes << " bytes";
}

}  // namespace shardd::e2e
