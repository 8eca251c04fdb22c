#ifndef SHARDD_COMMON_VERSION_H_
#define SHARDD_COMMON_VERSION_H_

namespace shardd {

inline constexpr char kVersion[] = "0.1.0";

// Version of protos, ring records and page layouts together. Client and daemon must have the same.
inline constexpr int kProtocolVersion = 13;

}  // namespace shardd

#endif  // SHARDD_COMMON_VERSION_H_
