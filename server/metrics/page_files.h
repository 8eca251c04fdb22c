#ifndef SHARDD_SERVER_METRICS_PAGE_FILES_H_
#define SHARDD_SERVER_METRICS_PAGE_FILES_H_

#include <array>

#include "absl/strings/string_view.h"

namespace shardd {

// A file of server/metrics/page, as the build has put it into the program.
struct PageFile {
  absl::string_view path;  // where it is served
  absl::string_view content_type;
  absl::string_view content;
};
const std::array<PageFile, 6>& PageFiles();

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_PAGE_FILES_H_
