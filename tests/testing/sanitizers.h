#ifndef SHARDD_TESTS_TESTING_SANITIZERS_H_
#define SHARDD_TESTS_TESTING_SANITIZERS_H_

// Whether this build is one that takes several times the time and memory: for limits of tests, never for what they
// check.

namespace shardd::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_SANITIZERS_H_
