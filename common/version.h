#ifndef SHARDD_COMMON_VERSION_H_
#define SHARDD_COMMON_VERSION_H_

namespace shardd {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace shardd

#endif  // SHARDD_COMMON_VERSION_H_
