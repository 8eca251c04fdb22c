#include "server/metrics/page_files.h"

#include <cstddef>

// The build defines the folder (CMakeLists.txt), and builds this anew where a file of it changes.
#define SHARDD_PAGE_FILE(name, file)                                                    \
  asm(".section .rodata\n"                                                              \
      "shardd_page_" #name                                                              \
      "_begin:\n"                                                                       \
      ".incbin \"" SHARDD_PAGE_FOLDER "/" file                                          \
      "\"\n"                                                                            \
      "shardd_page_" #name                                                              \
      "_end:\n"                                                                         \
      ".previous\n");                                                                   \
  extern "C" {                                                                          \
  extern const char shardd_page_##name##_begin[] __attribute__((visibility("hidden"))); \
  extern const char shardd_page_##name##_end[] __attribute__((visibility("hidden")));   \
  }
#define SHARDD_PAGE_CONTENT(name)               \
  absl::string_view(shardd_page_##name##_begin, \
                    static_cast<size_t>(shardd_page_##name##_end - shardd_page_##name##_begin))

SHARDD_PAGE_FILE(html, "status.html")
SHARDD_PAGE_FILE(css, "status.css")
SHARDD_PAGE_FILE(status_js, "status.js")
SHARDD_PAGE_FILE(pictures_js, "pictures.js")
SHARDD_PAGE_FILE(text_js, "text.js")
SHARDD_PAGE_FILE(icon, "icon.svg")

namespace shardd {

const std::array<PageFile, 6>& PageFiles() {
  static constexpr char kScript[] = "text/javascript; charset=utf-8";
  static const std::array<PageFile, 6> files = {{{"/", "text/html; charset=utf-8", SHARDD_PAGE_CONTENT(html)},
                                                 {"/status.css", "text/css; charset=utf-8", SHARDD_PAGE_CONTENT(css)},
                                                 {"/status.js", kScript, SHARDD_PAGE_CONTENT(status_js)},
                                                 {"/pictures.js", kScript, SHARDD_PAGE_CONTENT(pictures_js)},
                                                 {"/text.js", kScript, SHARDD_PAGE_CONTENT(text_js)},
                                                 {"/icon.svg", "image/svg+xml", SHARDD_PAGE_CONTENT(icon)}}};
  return files;
}

}  // namespace shardd
